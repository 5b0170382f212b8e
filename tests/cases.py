"""The one list of methods that every law runs over: a method joins by one line.

`spec`: small budgets, so that the laws' conversation (tests/laws/conversation.py) seals, trims and selects. `wide`: the same method with
a budget that no conversation exceeds, where it must equal the baseline. `variant`: another setting of a method listed before; its
laws run with `make slow`. A case that compacts between chunks says `chunked=True`.
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
    Case("snapkv:budget=11,window=3,chunk=4,slack=5,page=4", "snapkv:budget=128,window=32,chunk=16", variant=True),
    Case("snapkv:ratio=0.4,window=4,kernel=3,slack=4,page=4", "snapkv:ratio=1,window=4,page=4", variant=True),
    Case("quest:budget=8,page=4,dense_layers=1", "quest:budget=128,page=4,dense_layers=0"),
    Case("quest:budget=6,page=2,dense_layers=0,heads=shared", "quest:budget=128,page=2,dense_layers=0,heads=shared", variant=True),
    Case("quest:budget=12,page=2,dense_layers=0,top_p=0.7", "quest:budget=128,page=2,top_p=1", variant=True),
    Case(
        "flashprefill:alpha=0.5,block=4,tile=2,sinks=1,window=2,last=3,shortest=10,page=4",
        "flashprefill:alpha=0,block=4,tile=4,sinks=0,window=1,last=1,shortest=0,page=4",
    ),
    Case(
        "flashprefill:alpha=0.4,block=4,tile=4,sinks=1,window=1,last=1,shortest=0,correction=false,per_query_head=true,page=2",
        "flashprefill:alpha=0,block=4,tile=4,sinks=0,window=1,last=1,shortest=0,per_query_head=true,page=4",
        variant=True,
        chunked=True,  # a tile that a chunk's end cuts is two
    ),
    Case(
        "flashprefill:alpha=0.6,block=4,tile=5,sinks=0,window=1,last=1,shortest=0 + snapkv:budget=12,window=4,kernel=3,slack=4,page=4",
        "flashprefill:alpha=0,block=16,tile=4,shortest=0 + snapkv:budget=128,window=4,page=4",
        variant=True,
        chunked=True,
    ),
    Case(
        "flashprefill:alpha=0.6,block=2,tile=4,sinks=1,window=1,last=3,shortest=0 + h2o:budget=12,period=4,page=2",
        "flashprefill:alpha=0,block=16,tile=4,shortest=0 + h2o:budget=128",
        variant=True,
        chunked=True,
    ),
    Case(
        "flashprefill:alpha=0.6,block=4,tile=4,sinks=1,window=1,last=1,shortest=0 + quest:budget=8,page=4,dense_layers=1",
        "flashprefill:alpha=0,block=16,tile=4,shortest=0 + quest:budget=128",
        variant=True,
        chunked=True,
    ),
    Case(
        "flashprefill:alpha=0.6,block=4,tile=4,sinks=1,window=1,last=1,shortest=0 + omnikv:observers=(0,),budget=9,wait=0,page=4",
        "flashprefill:alpha=0,block=16,tile=4,shortest=0 + omnikv:observers=(0,),budget=128,wait=0",
        variant=True,
        chunked=True,
    ),
    Case("keydiff:budget=12,slack=4,page=4", "keydiff:budget=128"),
    Case("keydiff:budget=11,block=5,slack=3,page=4", "keydiff:budget=128,block=16", variant=True),
    Case("keydiff:ratio=0.5,slack=3,page=4", "keydiff:ratio=1", variant=True),
    Case("expected_attention:budget=12,sinks=2,future=8,slack=4,page=4", "expected_attention:budget=128"),
    Case("pyramidkv:budget=12,window=4,kernel=3,beta=2,slack=4,page=4", "pyramidkv:budgets=(128,128)"),
    Case(
        "pyramidkv:budget=12,window=3,kernel=1,beta=3,schedule=official,slack=4,page=4",
        "pyramidkv:budgets=(128,129),window=4",
        variant=True,
    ),
    Case("pyramidkv:ratio=0.3,window=3,kernel=3,beta=2,slack=4,page=4", "pyramidkv:ratio=1,window=4,schedule=official", variant=True),
    Case("adakv:budget=12,window=4,kernel=3,slack=4,page=4", "adakv:budget=128"),
    Case("adakv:budget=12,window=3,kernel=1,floor=0.5,normalize=true,slack=3,page=2", "adakv:budget=128,slack=1", variant=True),
    Case("adakv:budget=11,window=3,kernel=3,rule=kvpress,slack=4,page=4", "adakv:budget=128,rule=kvpress", variant=True),
    Case("adakv:ratio=0.4,window=4,kernel=3,normalize=true,slack=4,page=4", "adakv:ratio=1,window=4,page=4", variant=True),
    Case("adakv:ratio=0.3,window=3,kernel=1,rule=kvpress,slack=3,page=2", "adakv:ratio=1,rule=kvpress", variant=True),
    Case(
        "adakv:budget=12,window=4,kernel=3,slack=4,page=4 + quest:budget=8,page=4,dense_layers=0",
        "adakv:budget=128 + quest:budget=128",
        variant=True,
    ),
    Case("kvzip:ratio=0.4,sinks=2,chunk=8,tail=3,instruction_ids=(5,6,-1,7,-1,8),page=4", "kvzip:ratio=1,page=4"),
    Case(
        "kvzip:ratio=0.3,mode=pair-uniform,sinks=1,chunk=5,instruction_ids=(9),turn_ids=(27),page=2",
        "kvzip:ratio=1,mode=pair-uniform",
        variant=True,
    ),
    Case("kvzip:ratio=0.6,mode=head,scores=(0.9,0.3,0.5,0.7),page=4", "kvzip:ratio=1,mode=head,scores=(1,1,1,1)", variant=True),
    Case("kvzip:ratio=0.5,rule=kvpress,chunk=7,tail=2,instruction_ids=(5,6,-1,7),page=4", "kvzip:ratio=1,rule=kvpress", variant=True),
    Case(
        "kvzip:ratio=0.4,sinks=2,chunk=8,instruction_ids=(5,6),page=4 + quest:budget=8,page=4,dense_layers=0",
        "kvzip:ratio=1 + quest:budget=128",
        variant=True,
    ),
    Case(
        "flashprefill:alpha=0.6,block=4,tile=4,sinks=1,window=1,last=1,shortest=0 + kvzip:ratio=0.4,chunk=8,instruction_ids=(5,6),page=4",
        "flashprefill:alpha=0,block=16,tile=4,shortest=0 + kvzip:ratio=1",
        variant=True,
        chunked=True,
    ),
    Case("tova:budget=12,page=4", "tova:budget=128"),
    Case("tova:budget=11,period=3,protect_last=true,page=4", "tova:budget=128,period=9", variant=True),
    Case("tova:ratio=0.3,period=2,page=4", "tova:ratio=1", variant=True),
    Case("h2o:budget=12,period=4,page=4", "h2o:budget=128"),
    Case("h2o:ratio=0.3,period=0,page=4", "h2o:ratio=1,period=0", variant=True),
    Case("h2o:budget=10,recent=3,period=1,normalise=true,page=2", "h2o:budget=128,normalise=true", variant=True),
    Case("h2o:budget=8,recent=3,period=4,prefill_budget=11,page=4", "h2o:budget=128,prefill_budget=128", variant=True, chunked=True),
    Case("rkv:budget=12,window=4,kernel=3,period=4,page=4", "rkv:budget=128"),
    Case("rkv:ratio=0.4,window=3,kernel=3,period=3,page=4", "rkv:ratio=1,period=0", variant=True),
    Case("rkv:budget=13,window=5,kernel=1,mix=0.6,period=2,zero_column0=true,page=4", "rkv:budget=128,mix=0.5", variant=True),
    Case(
        "skipkv:budget=13,sinks=2,window=4,near=6,segment=2,shortest=2,longest=12,threshold=0.3,tau=0.4,"
        "delimiters=(3,9,14,22,26,35,43,51,58,65,74,79,86,93),period=4,page=4",
        "skipkv:budget=128,delimiters=(3,)",
    ),
    Case(
        "skipkv:ratio=0.3,sinks=0,window=3,alpha=0.5,near=5,segment=3,shortest=1,longest=9,sentences=5,tau=0.3,"
        "delimiters=(1,9,17,25,33,41,49,57,65,73,81,89),period=2,page=2",
        "skipkv:ratio=1,delimiters=(3,),alpha=1,period=0",
        variant=True,
    ),
    Case(
        "skipkv:budget=12,window=4,near=6,shortest=2,tau=0.4,delimiters=(3,9,14,22,26,35,43,51,58,65,74,79,86,93),period=4,page=4"
        " + quest:budget=8,page=4,dense_layers=0",
        "skipkv:budget=128,delimiters=(3,) + quest:budget=128",
        variant=True,
    ),
    Case("omnikv:observers=(0,),budget=9,wait=0,page=4", "omnikv:observers=(0,),budget=128,wait=0"),
    Case("omnikv:observers=(0,),ratio=0.4,wait=0,selector=softmax,page=4", "omnikv:observers=(0,),ratio=1,wait=0", variant=True),
    Case(
        "retroinfer:ratio=0.3,estimate=0.4,sinks=2,recent=3,cluster=2,threshold=12,update=4,segment=16,page=4",
        "retroinfer:ratio=1,estimate=0,sinks=2,recent=3,cluster=2,threshold=12,update=4,segment=16",
    ),
    Case(  # the first index at a later prompt's end, in segments
        "retroinfer:ratio=0.2,estimate=0.3,sinks=1,recent=4,cluster=2,threshold=24,update=6,segment=8,page=2",
        "retroinfer:ratio=1,sinks=1,recent=4,cluster=4,threshold=24,update=8,segment=8",
        variant=True,
    ),
    Case(  # the first index while decoding
        "retroinfer:ratio=0.1,estimate=1,sinks=2,recent=3,cluster=4,threshold=16,update=8,page=4",
        "retroinfer:threshold=128",
        variant=True,
    ),
    Case("rkv:budget=12,window=4,kernel=3,period=4,page=4 + quest:budget=8,page=4,dense_layers=0", "rkv:budget=128 + quest:budget=128"),
)
