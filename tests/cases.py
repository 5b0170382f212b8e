"""The one list of methods that every law runs over: a method joins by one line.

`spec`: small budgets, so that the laws' conversation (tests/laws/conversation.py) seals, trims and selects. `wide`: the same method with
a budget that no conversation exceeds, where it must equal the baseline. A case that compacts between chunks says `chunked=True`.
"""

from typing import NamedTuple


class Case(NamedTuple):
    spec: str
    wide: str
    chunked: bool = False


CASES = (
    Case("full:page=4", "full:page=8"),
    Case("streamingllm:sinks=3,recent=9,page=4", "streamingllm:sinks=3,recent=125,page=4"),
    Case("streamingllm:sinks=3,recent=10,positions=true,prefill=window,page=4", "streamingllm:positions=true,prefill=window,page=4"),
    Case("snapkv:budget=12,window=4,kernel=3,slack=4,page=4", "snapkv:budget=128,window=4,page=4"),
    Case("snapkv:budget=10,window=3,kernel=3,pooling=avg,sinks=2,slack=1,heads=shared,page=2", "snapkv:budget=128,heads=shared,slack=1"),
    Case("quest:budget=8,page=4,dense_layers=1", "quest:budget=128,page=4,dense_layers=0"),
    Case("quest:budget=6,page=2,dense_layers=0,heads=shared", "quest:budget=128,page=2,dense_layers=0,heads=shared"),
)
