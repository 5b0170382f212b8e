"""The engine's loop body: plan, run, commit. One thread owns everything here; `turn` never waits for input.

The device runs one step ahead: step k is dispatched before the tokens of step k - 1 are read, so stop ids and limits are
checked on the device. What the host decides late (stop strings) concerns only rows that wait for their last token.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from typing import Any

import numpy as np

from sejax.cache.chain import Index
from sejax.serve.device import Device
from sejax.serve.live import record
from sejax.serve.pace import Pace
from sejax.serve.request import Finish, Mark
from sejax.serve.runs import Runs
from sejax.serve.sampling import GREEDY_BELOW
from sejax.serve.schedule import Parked, Room, Waiting, admit
from sejax.serve.sequence import Request, Session

LOOK_AHEAD = 8  # requests of the queue that are considered for a start
RESERVE = 1024  # tokens of an answer that admission sets aside: clients rarely say how long theirs will be


class Core:
    """State of the engine thread. lanes: token rows of each prefill lane."""

    def __init__(self, device: Device, slots: int, lanes: dict[int, int], pace: Pace, root: bytes):
        self.device, self.slots, self.lanes, self.pace = device, slots, lanes, pace
        self.runs = Runs(device)
        self.free = deque(range(device.sizes.slots))
        self.index = Index(root)
        self.sessions: dict[int, Session] = {}
        self.parked: dict[int, Session] = {}
        self.waiting: deque[Request] = deque()
        self.prefilling: list[Request] = []
        self.running: list[Request] = []
        self.paused: deque[Request] = deque()
        self.flight: deque[tuple[str, Any, Any]] = deque()
        self.keys = 0
        self.marks: tuple[Mark, ...] = ()
        self.counts: dict[str, int] = {}
        self.finished: dict[str, int] = {}

    # ---- plan ----

    def turn(self) -> bool:
        """One round; False if there was nothing to do."""
        self._resume()
        self._admit()
        launched = self._prefill() | self._decode()
        while self.flight and (len(self.flight) > 1 or not launched or self._must_wait()):
            self._commit()
            launched = True
        return launched or bool(self.prefilling)

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.prefilling or self.running or self.paused or self.flight)

    def requests(self) -> list[Request]:
        """Everything that has not had its last delta."""
        closing = [r for kind, r, _ in self.flight if kind == "last"]
        return [*self.waiting, *self.prefilling, *self.running, *self.paused, *closing]

    def _must_wait(self) -> bool:
        return not any(self._ready(r) for r in self.running)

    def _describe(self, request: Request) -> Waiting:
        hit = self.index.lookup(request.prompt.ids, whole=not self.device.truncates)
        # A session of which only a small beginning fits is somebody else's: it stays.
        if hit and hit.length * 2 < self.sessions[hit.key].stored:
            hit = None
        size = len(request.prompt.ids)
        want = self.runs.needed(size + min(request.limit, RESERVE), self.sessions[hit.key] if hit else None)
        have = len(self.sessions[hit.key].pages) if hit else 0
        return Waiting(request.id, size - (hit.length if hit else 0), hit.key if hit else None, max(0, want - have))

    def _admit(self) -> None:
        if not self.waiting or self.paused:
            return
        active = len(self.running) + len(self.prefilling)
        busy = {r.lane for r in self.prefilling}
        lanes = {n: size for n, size in self.lanes.items() if n not in busy}
        room = Room(self.device.sizes.rows - active, self.slots - len(self.sessions), self.runs.free, lanes)
        if room.rows < 1 or not lanes:
            return
        waiting = [self._describe(r) for r in itertools.islice(self.waiting, LOOK_AHEAD)]
        parked = [Parked(s.key, s.used, len(s.pages)) for s in self.parked.values()]
        by_id = {w.id: w for w in waiting}
        requests = {r.id: r for r in self.waiting}
        for admission in admit(waiting, parked, room):
            for key in admission.drop:
                self._drop(self.parked[key])
            request, session = requests[admission.id], by_id[admission.id].session
            # Two requests of one session: the second finds it taken and starts afresh when it is described again.
            if session is not None and session not in self.parked:
                continue
            self.waiting.remove(request)
            self._start(request, self.parked.get(session) if session is not None else None, admission.lane)

    # ---- prefill ----

    def _start(self, request: Request, session: Session | None, lane: int) -> None:
        request.started, request.lane = time.monotonic(), lane
        ids, fresh = list(request.prompt.ids), session is None
        if session is None:
            self.keys += 1
            session = Session(self.keys, self.device.sizes.slots if self.device.stage is not None else self.free.popleft(), [])
            self.sessions[session.key] = session
        else:
            self.parked.pop(session.key)
            hit = self.index.lookup(ids, whole=not self.device.truncates)
            request.cached = hit.length if hit else 0
            self.index.remove(session.key)
            if session.held > request.cached:
                self.device.truncate(session.slot, request.cached)
            session.stored = session.held = request.cached
        request.session = session
        request.target = self.free.popleft() if self.device.stage is not None else session.slot
        self.runs.cover(session, len(ids))
        new = ids[request.cached :]
        request.units = self.device.prefill(new, request.cached, session.slot, request.target, lane, fresh)
        self.prefilling.append(request)
        self._remark()

    def _prefill(self) -> bool:
        """Units of the prompts in turn: at least one, and as many as fit between two decode steps."""
        spent, worked = 0.0, False
        patience = self.pace.patience(self.device.programs.rows_bucket(max(1, len(self.running))))
        while self.prefilling and (not worked or spent + self.prefilling[0].unit_seconds <= patience):
            request = self.prefilling.pop(0)
            assert request.units is not None
            worked, unit = True, next(request.units, None)
            if unit is None:
                self._begin(request, *request.last_unit)
                continue
            request.last_unit = unit
            self.prefilling.append(request)
            while self.pace.owed():
                self._commit()
            self.pace.launched(unit[0], request, unit[1])
            spent += request.unit_seconds
        return worked

    def _begin(self, request: Request, x: Any, bucket: int) -> None:
        session = request.session
        assert session is not None
        if session.slot != request.target:
            self._free_slot(session.slot)
            session.slot = request.target
        size = len(request.prompt.ids)
        new = size - request.cached
        at = new - sum(self.device.chunks(new)[:-1]) - 1
        session.ids, session.stored, session.held = list(request.prompt.ids), size, size
        values = record(request.sampling, request.stop_ids, size, 0, request.limit, 0, request.seed)
        token = self.device.begin(x, bucket, at, session.slot, values)
        request.lane, request.units = None, None
        request.launched = request.flying = 1
        self.running.append(request)
        used = None if request.cached else self.device.used(session.slot)
        self.flight.append(("first", request, (token, self.device.held(session.slot), used)))
        self.counts["prompt"] = self.counts.get("prompt", 0) + size
        self.counts["cached"] = self.counts.get("cached", 0) + request.cached

    # ---- decode ----

    def _ready(self, request: Request) -> bool:
        waits = bool(request.sampling.stop) and not self.device.truncates
        return request.launched < request.limit and not (waits and request.flying) and not request.closing

    def _decode(self) -> bool:
        ready = [r for r in self.running if self._ready(r)]
        steps = self._steps(ready)
        for request in list(ready):
            session = request.session
            assert session is not None
            while request in ready and not self.runs.cover(session, len(session.ids) + request.flying + steps):
                if self.parked:
                    self._drop(min(self.parked.values(), key=lambda s: (s.used, s.key)))
                    continue
                youngest = max(self.running, key=lambda r: r.id)
                self._pause(youngest)
                ready = [r for r in ready if r in self.running and self._ready(r)]
        if not ready:
            return False
        slots = [r.session.slot for r in ready if r.session]
        out = self.device.decode(slots, all(r.sampling.temperature < GREEDY_BELOW for r in ready), steps)
        self.pace.sent(self.device.programs.rows_bucket(len(slots)), steps)
        for request in ready:
            request.launched += steps
            request.flying += steps
        self.flight.append(("step", ready, out))
        return True

    def _steps(self, ready: list[Request]) -> int:
        """Decode steps of the next program: a burst while nobody streams, waits, or is about to end."""
        burst = self.device.sizes.burst
        calm = not (self.waiting or self.prefilling or self.paused)
        whole = all(not r.streams and not r.sampling.stop and r.limit - r.launched >= burst for r in ready)
        short = sum(self.runs.short(r.session, len(r.session.ids) + r.flying + burst) for r in ready if r.session)
        return burst if calm and whole and short <= self.runs.free else 1

    # ---- commit ----

    def _commit(self) -> None:
        """Read the oldest result in flight."""
        kind, who, out = self.flight.popleft()
        if kind == "last":
            self._close(who, float(out))
        elif kind == "first":
            who.first = time.monotonic()
            who.session.kept = float(out[1])
            if out[2] is not None:
                size = len(who.session.ids)
                self.runs.settle(who.session, size, size + who.flying + 1, int(out[2]))
            self._token(who, int(np.asarray(out[0])[0]), first=True)
        elif kind == "trimmed":
            if who in self.running:
                self.runs.settle(who.session, out[0], len(who.session.ids) + who.flying + 1, int(out[1]))
        else:
            found = np.asarray(out)  # [steps,2,B], tokens and due flags
            self.pace.read()
            due = [r for r, full in zip(who, found[-1, 1], strict=False) if full and r.session and r in self.running]
            for request in due:
                self.device.trim(request.session.slot)
            for request, token in itertools.chain.from_iterable(zip(who, tokens, strict=False) for tokens in found[:, 0]):
                if token >= 0:
                    self._token(request, int(token))
                    continue
                request.flying -= 1
                if request.finish is None:
                    request.launched -= 1  # it had to make room first: the step is owed
                if request.closing and not request.flying and request in self.running:
                    self._finish(request, "cancelled")
            for request in due:  # the last token of `ids` is sampled, not stored
                used = self.device.used(request.session.slot) if self.runs.total and request in self.running else None
                if used is not None:
                    self.flight.append(("trimmed", request, (len(request.session.ids) - 1, used)))

    def _token(self, request: Request, token: int, first: bool = False) -> None:
        request.flying -= 1
        session = request.session
        assert session is not None
        if request.finish is not None:
            return  # it ran on past a stop string: `held` says so, and the slot is truncated before its next turn
        if not first:
            session.stored += 1
            session.held += 1
            session.kept += 1
        session.ids.append(token)
        request.out.append(token)
        self.counts["generated"] = self.counts.get("generated", 0) + 1
        if request.closing:
            if not request.flying:
                self._finish(request, "cancelled")
            return
        text, stopped = request.text.push([token])
        request.emit(text, (token,))
        if stopped or token in request.stop_ids:
            self._finish(request, "stop")
        elif len(request.out) >= request.limit:
            self._finish(request, "length")

    def _finish(self, request: Request, finish: Finish) -> None:
        """The answer is complete: park its session, send the last delta once the kept rows are known."""
        request.finish = finish
        if finish != "cancelled":
            request.emit(request.text.finish(), ())
        self.running.remove(request)
        session = request.session
        assert session is not None
        ended = bool(request.out) and request.out[-1] in request.stop_ids
        committed = len(request.out) if ended else min(request.text.committed, len(request.out))
        if request.prompt.text:
            end = self.device.model.tokenizer.decode([request.out[-1]]) if ended and self.device.model.tokenizer else ""
            ids = (*request.prompt.ids, *request.out[:committed])
            session.mark = Mark(request.prompt.text + "".join(request.visible) + end, ids)
        session.used = time.monotonic()
        session.held += 0 if ended else request.flying  # a stop id idles the row on the device: nothing more was stored
        self._park(session)
        self.flight.append(("last", request, self.device.held(session.slot)))

    def _park(self, session: Session) -> None:
        self.parked[session.key] = session
        self.index.insert(session.key, session.ids[: session.stored])
        self._remark()

    def _close(self, request: Request, kept: float) -> None:
        if request.session:
            request.session.kept = kept
        finish = request.finish or "error"
        self.finished[finish] = self.finished.get(finish, 0) + 1
        request.close(finish, kept)

    # ---- slots and memory ----

    def _remark(self) -> None:
        self.marks = tuple(s.mark for s in self.parked.values() if s.mark)

    def _free_slot(self, slot: int) -> None:
        if slot < self.device.sizes.slots:
            self.free.append(slot)

    def _drop(self, session: Session) -> None:
        """Forget a session; its next turn computes its prompt anew."""
        self.parked.pop(session.key, None)
        self.sessions.pop(session.key, None)
        self.index.remove(session.key)
        self.runs.give_back(session.pages)
        self._free_slot(session.slot)
        self.counts["evicted"] = self.counts.get("evicted", 0) + len(session.ids)
        self._remark()

    def cancel(self, id: int) -> None:
        """Stop a request wherever it is; what its session held before stays."""
        request = next((r for r in self.requests() if r.id == id and r.finish is None), None)
        if request is None:
            return
        if request in self.running:
            request.closing = True  # its session must know every token the device stores: wait for those in flight
            if not request.flying:
                self._finish(request, "cancelled")
            return
        request.finish = "cancelled"
        session = request.session
        if request in self.prefilling:
            self.prefilling.remove(request)
            assert session is not None
            self._abandon(request, session)
        elif request in self.paused:
            self.paused.remove(request)
            if session is not None:
                self.sessions.pop(session.key, None)
        else:
            self.waiting.remove(request)
        self._close(request, session.kept if session else 0.0)

    def _abandon(self, request: Request, session: Session) -> None:
        """A prompt cancelled half-way: the session as it was goes on, if its method left it untouched."""
        staged = self.device.stage is not None
        if staged:
            self._free_slot(request.target)
        if session.stored == 0 or not (staged or self.device.truncates):
            self.sessions.pop(session.key, None)
            self.runs.give_back(session.pages)
            self._free_slot(session.slot)
            return
        session.held = session.stored if staged else len(request.prompt.ids)
        session.ids = session.ids[: session.stored]
        session.mark = session.mark if staged else None
        self._park(session)

    def _pause(self, request: Request) -> None:
        """Move the youngest request's state to the host, so that the others go on."""
        while self.flight:
            self._commit()
        session = request.session
        if request not in self.running or session is None:
            return
        self.running.remove(request)
        request.saved = self.device.take(session.slot)
        self.runs.give_back(session.pages)
        self._free_slot(session.slot)
        session.slot = self.device.sizes.slots
        self.paused.appendleft(request)
        self.counts["paused"] = self.counts.get("paused", 0) + 1

    def _resume(self) -> None:
        """Paused requests go on, oldest first, when their pages fit again."""
        while self.paused and len(self.running) + len(self.prefilling) < self.device.sizes.rows:
            request = min(self.paused, key=lambda r: r.id)
            session = request.session
            assert session is not None
            need = self.runs.needed(len(session.ids) + min(request.limit - len(request.out), RESERVE), session)
            while self.parked and (self.runs.free < need or not self.free):
                self._drop(min(self.parked.values(), key=lambda s: (s.used, s.key)))
            if not self.free or (self.runs.free < need and (self.running or self.prefilling)):
                return
            self.paused.remove(request)
            session.slot = self.free.popleft()
            self.runs.cover(session, session.stored + 1)
            self.device.put(session.slot, request.saved)
            left = request.limit - len(request.out)
            values = (session.stored, session.ids[-1], left, len(request.out), request.seed)
            self.device.set_live(session.slot, record(request.sampling, request.stop_ids, *values))
            request.saved, request.launched, request.flying = None, len(request.out), 0
            self.running.append(request)
