"""The one list of methods that every law runs over: a method joins by one line.

`spec`: small budgets, so that the laws' conversation (tests/laws/conversation.py) seals, trims and selects. `wide`: the same method with
a budget that no conversation exceeds, where it must equal the baseline. `variant`: another setting of a method listed before; by
default only the oracle's law runs over it, the others with `make slow`. A case that compacts between chunks says `chunked=True`.
"""

from typing import NamedTuple


class Case(NamedTuple):
    spec: str
    wide: str
    variant: bool = False
    chunked: bool = False


CASES = (
    Case("full:page=4", "full:page=8"),
    Case("streamingllm:sinks=3,recent=9,page=4", "streamingllm:sinks=3,recent=125,page=4"),
    Case(
        "streamingllm:sinks=3,recent=10,positions=true,prefill=window,page=4",
        "streamingllm:positions=true,prefill=window,page=4",
        variant=True,
    ),
    Case("snapkv:budget=12,window=4,kernel=3,slack=4,page=4", "snapkv:budget=128,window=4,page=4"),
    Case(
        "snapkv:budget=10,window=3,kernel=3,pooling=avg,sinks=2,slack=1,heads=shared,page=2",
        "snapkv:budget=128,heads=shared,slack=1",
        variant=True,
    ),
    Case("quest:budget=8,page=4,dense_layers=1", "quest:budget=128,page=4,dense_layers=0"),
    Case("quest:budget=6,page=2,dense_layers=0,heads=shared", "quest:budget=128,page=2,dense_layers=0,heads=shared", variant=True),
    Case("keydiff:budget=12,slack=4,page=4", "keydiff:budget=128"),
    Case("keydiff:budget=11,block=5,slack=3,page=4", "keydiff:budget=128,block=16", variant=True),
    Case("expected_attention:budget=12,sinks=2,future=8,slack=4,page=4", "expected_attention:budget=128"),
    Case("pyramidkv:budget=12,window=4,kernel=3,beta=2,slack=4,page=4", "pyramidkv:budgets=(128,128)"),
    Case(
        "pyramidkv:budget=12,window=3,kernel=1,beta=3,schedule=official,slack=4,page=4",
        "pyramidkv:budgets=(128,129),window=4",
        variant=True,
    ),
    Case("adakv:budget=12,window=4,kernel=3,slack=4,page=4", "adakv:budget=128"),
    Case("adakv:budget=12,window=3,kernel=1,floor=0.5,normalize=true,slack=3,page=2", "adakv:budget=128,slack=1", variant=True),
    Case("adakv:budget=11,window=3,kernel=3,rule=kvpress,slack=4,page=4", "adakv:budget=128,rule=kvpress", variant=True),
    Case("tova:budget=12,page=4", "tova:budget=128"),
    Case("tova:budget=11,period=3,protect_last=true,page=4", "tova:budget=128,period=9", variant=True),
    Case("h2o:budget=12,period=4,page=4", "h2o:budget=128"),
    Case("h2o:budget=10,recent=3,period=1,normalise=true,page=2", "h2o:budget=128,normalise=true", variant=True),
    Case("rkv:budget=12,window=4,kernel=3,period=4,page=4", "rkv:budget=128"),
    Case("rkv:budget=13,window=5,kernel=1,mix=0.6,period=2,zero_column0=true,page=4", "rkv:budget=128,mix=0.5", variant=True),
    Case("omnikv:observers=(0,),budget=9,wait=0,page=4", "omnikv:observers=(0,),budget=128,wait=0"),
    Case("omnikv:observers=(0,),ratio=0.4,wait=0,selector=softmax,page=4", "omnikv:observers=(0,),ratio=1,wait=0", variant=True),
    Case("rkv:budget=12,window=4,kernel=3,period=4,page=4 + quest:budget=8,page=4,dense_layers=0", "rkv:budget=128 + quest:budget=128"),
)
