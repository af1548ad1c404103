"""Dry run of one rank: find out how its calls can run while all ranks run their collectives together."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch

from opgrip.replay.cases.flow import FlowingCall
from opgrip.replay.operators.devices import check_use, is_accelerator, synchronizer
from opgrip.replay.operators.lookup import Operator, Unsupported
from opgrip.replay.results.results import UNSUPPORTED as NOT_SUPPORTED
from opgrip.replay.sequences.dry_run import SUBSTITUTED, UNSUPPORTED, CallPlan, DryRun
from opgrip.replay.sequences.ranks.control import Control, RankEndedError
from opgrip.replay.sequences.ranks.rank_collectives import LOCAL, ReplayedCollective
from opgrip.replay.sequences.ranks.running import RankExchange, Started
from opgrip.replay.sequences.step_memory import reason_of
from opgrip.replay.timing.rounds import NO_ROW


def _hand_on(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


class RankDryRun(DryRun):
    """Dry run over the calls of one rank; it holds the plan for each call.

    A collective runs once in every pass, even if its arguments cannot be prepared as planned, because other ranks wait
    for it.

    exchanges : signature numbers of calls that exchange data between processes
    collectives, starters : collectives that run and the functions that start them, by signature number
    left_out : why a collective does not run, by place of the call; calls that a group's backend cannot run are added
    waits : collectives that must be done before a call, by place of the call
    others : as for `DryRun`
    exchange : collectives of the current pass
    """

    def __init__(
        self,
        control: Control,
        exchanges: Collection[int],
        collectives: Mapping[int, ReplayedCollective],
        starters: Mapping[int, Callable[..., Started]],
        left_out: Mapping[int, str],
        waits: Mapping[int, list[int]],
        *others: Any,
    ) -> None:
        super().__init__(*others)
        self.control = control
        self._exchanges, self._collectives, self._starters = exchanges, collectives, starters
        self.left_out = dict(left_out)
        self._place_of_call = {id(call): place for place, call in enumerate(self.flow.calls)}
        self.exchange = RankExchange(waits, synchronizer(self._device), is_accelerator(self._device))

    def begin(self) -> None:
        """Restore all memory after the last collective that writes into it is done."""
        try:
            self.exchange.begin()
        except RankEndedError as error:
            self.control.lost(error)
        super().begin()

    def runs_with_others(self, call: FlowingCall) -> bool:
        """Return True if a call is a collective that runs."""
        return call.signature in self._starters and self.place_of(call) not in self.left_out

    def place_of(self, call: FlowingCall) -> int:
        """Return the index of a call in the calls of this rank."""
        return self._place_of_call[id(call)]

    def before(self, call: FlowingCall) -> None:
        """Wait for the collectives that must be done before a call."""
        try:
            self.exchange.before(self.place_of(call))
        except RankEndedError as error:
            self.control.lost(error)

    def finish(self) -> None:
        """Wait for all collectives of a pass."""
        try:
            self.exchange.finish()
        except RankEndedError as error:
            self.control.lost(error)

    def meet(self, call: FlowingCall, plan: CallPlan) -> Any:
        """Start a collective with the other ranks; raise `Unsupported` if the group's backend cannot run it."""
        assert plan.prepared is not None, "prepared in the dry run"
        args, _ = plan.prepared.arguments(self.memory, call.takes)
        self.announce(call.signature, NO_ROW)
        try:
            place, collective = self.place_of(call), self._collectives[call.signature]
            return self.exchange.start(place, self._starters[call.signature], args, collective.is_async)
        except RankEndedError as error:
            self.control.lost(error)

    def _try(self, call: FlowingCall, plan: CallPlan) -> bool:
        self.before(call)
        if call.signature not in self._exchanges:
            return super()._try(call, plan)
        before = plan.status, len(plan.redrawn)
        result = None
        if self.runs_with_others(call):
            self._make_ready(call, plan)
            try:
                result = self.meet(call, plan)
            except Unsupported as error:
                self.left_out[self.place_of(call)] = str(error)
        if not self.runs_with_others(call):
            reason = self.left_out.get(self.place_of(call), "it is left out")
            plan.status, plan.prepared, plan.reason = UNSUPPORTED, None, reason
            plan.row_status = NOT_SUPPORTED
        self.hand_on(call, plan, result)
        self.memory.drop(call.over)
        return before != (plan.status, len(plan.redrawn))

    def _make_ready(self, call: FlowingCall, plan: CallPlan) -> None:
        """Prepare a collective on results of earlier calls or, if that fails, on drawn values; end all ranks if neither
        works.
        """
        reason = plan.reason
        if plan.status != SUBSTITUTED:
            try:
                plan.prepared = self._arrange(call, plan)
                self.redraw(call, plan)
                plan.prepared.arguments(self.memory, call.takes)
                return
            except Exception as error:
                check_use(self._device, error)
                reason = reason_of(error)
        try:
            plan.status, plan.reason, plan.redrawn = SUBSTITUTED, reason, set()
            plan.prepared = self._prepare(call.signature, frozenset(range(len(call.takes))))
        except Exception as error:
            check_use(self._device, error)
            self.control.refuse(f"{call.op} cannot be run, for which the other ranks wait: {reason_of(error)}")

    def _is_unsettled(self, changed: bool) -> bool:
        self.finish()
        return bool(self.control.most(int(changed))[0])

    def _find(self, signature: int) -> Operator:
        record = self.flow.signatures.get(signature)
        if signature in self._exchanges:
            if signature not in self._starters:
                raise Unsupported("it is left out")
            return Operator(self._starters[signature], mutates=True)
        if record is not None and record.op in LOCAL:
            return Operator(_hand_on, mutates=False)
        return super()._find(signature)
