"""Keep every token and read every token."""

from sejax.cache.method import composed
from sejax.cache.storage import raw
from sejax.types import Method


def full(page: int = 16) -> Method:
    """The dense baseline: all tokens stay, all are read.

    o_t = softmax(q_t K[:t]^T / sqrt(D)) V[:t]

    Family: baseline
    Paper: Vaswani et al. 2017, arXiv 1706.03762; paged as in Kwon et al. 2023, arXiv 2309.06180.
    Differs: not at all.
    Keeps: every token, always.

    Args:
        page: tokens a page of the pool.
    """
    return composed("full", {"page": page}, raw(page))
