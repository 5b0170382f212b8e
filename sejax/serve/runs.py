"""The pages of sessions whose runs grow: how many each needs, and granting them as they fill."""

from __future__ import annotations

from sejax.serve.device import Device
from sejax.serve.pages import Pages
from sejax.serve.sequence import Session

GRANT = 8  # pages a growing run gets at a time


class Runs(Pages):
    """The device's pool. Empty for methods whose slots have their whole run: these need nothing."""

    def __init__(self, device: Device):
        super().__init__(device.sizes.pages or 0)
        self._device = device

    def needed(self, tokens: int, session: Session | None = None) -> int:
        """Pages that `tokens` take, in a session that was packed fewer."""
        packed, pages = session.packed if session else (0, 0)
        return pages + self._device.pages_of(tokens - packed) if self.total else 0

    def short(self, session: Session, tokens: int) -> int:
        """Pages that the run lacks to hold `tokens`."""
        return max(0, self.needed(tokens, session) - len(session.pages))

    def cover(self, session: Session, tokens: int) -> bool:
        """Grant pages so that the run holds `tokens`; False if the pool is short."""
        short = self.short(session, tokens)
        if short == 0:
            return True
        if self.free < short:
            return False
        whole = self.needed(self._device.sizes.max_len, session) - len(session.pages)
        session.pages += self.grant(min(max(short, GRANT), whole, self.free))
        self._device.set_pages(session.slot, session.pages)
        return True

    def settle(self, session: Session, stored: int, tokens: int, used: int) -> None:
        """The first `stored` tokens were packed into `used` pages: what holding `tokens` does not need any longer is given back."""
        session.packed = (stored, used)
        self.shrink(session.pages, self.needed(tokens, session))
        self._device.set_pages(session.slot, session.pages)
