"""Timed runs of calls in other processes, on new values, with checks of the results of some runs."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter_ns

import numpy as np
import torch
from torch import Tensor

from opgrip.replay.cases.cases import Case
from opgrip.replay.cases.selection import Variant
from opgrip.replay.checks.reference import Reference
from opgrip.replay.checks.verdicts import ResultVerdict, WrongResultError
from opgrip.replay.inputs.filling import memory_of
from opgrip.replay.inputs.inputs import Inputs
from opgrip.replay.modes import CANDIDATE, RunOutputs
from opgrip.replay.operators.lookup import Operator, Unsupported
from opgrip.replay.operators.memory import CallMemory, tensors_in
from opgrip.replay.results.ratios import shares_of
from opgrip.replay.run.untrusted import process_of
from opgrip.replay.run.untrusted_call import UntrustedCall, UntrustedRun
from opgrip.replay.run.workload import Workload
from opgrip.replay.timing.stopwatch import Stopwatch
from opgrip.replay.timing.timed_functions import InputSet, Stratum, TimedFunction
from opgrip.traces.schema.records import Signature

UNKNOWN = CallMemory(0, 0)  # memory of a call that another process runs
CERTAIN, CHECKED = 8, 2  # number of timed runs that are checked; of the later ones, one of this number is, at random
# largest relative change of floating-point values, without which values that the trace keeps were always the same
CHANGE = 1e-3
MARGIN = 0.1  # share by which the time of a candidate's request outside its call may exceed the operator's, by chance
KEPT = 51  # number of latest requests over which these times are compared


# function that compares results with the operator's on the same inputs
Check = Callable[[Inputs, RunOutputs], ResultVerdict]


@dataclass(slots=True, kw_only=True)
class UntrustedFunction(TimedFunction):
    """A call in another process, with new values and new memory in each run.

    draw : returns new inputs of an input set, by index and seed
    check : compares the results of a run with the operator's; None for the operator itself
    overhead_ns : times in ns that requests to run the operator took outside its call; the operator's function adds to
        them
    """

    call: UntrustedCall
    draw: Callable[[int, int], Inputs]
    check: Check | None
    overhead_ns: list[int]
    _took_ns: list[int] = field(default_factory=list)
    _checks: int = 0

    def run(self) -> None:
        self._run(0)

    def run_untimed(self, stopwatch: Stopwatch) -> None:
        self._run(0)

    def time(
        self, stopwatch: Stopwatch, flush: Callable[[], None] | None, recent: Sequence[int] = ()
    ) -> tuple[Stratum, float]:
        """Time one run by the other process's clock, and check the results of some runs. The parameters have no effect.

        The time is at least that of the whole request minus the time that a request to run the operator takes outside
        its call.
        """
        stratum: Stratum = self.samples.next_stratum  # type: ignore[assignment]
        began = perf_counter_ns()
        try:
            return (stratum[0], False), self._run(stratum[0])
        finally:
            self.samples.spent_ns += perf_counter_ns() - began

    def _run(self, index: int) -> float:
        inputs = self._next_inputs(index)
        args, kwargs = inputs.make()
        run = self.call.run(args, kwargs)
        if self.check is None:
            self.overhead_ns.append(run.overhead_ns)
        elif self._checks < CERTAIN or not secrets.randbelow(CHECKED):
            self._checks += 1
            self._compare(inputs, run)
        self._took_ns.append(run.run_ns + run.overhead_ns)
        took_ns, usual_ns = (np.quantile(own[-KEPT:] or [0], 0.25) for own in (self._took_ns, self.overhead_ns))
        # work outside the reported time is the candidate's, except what the operator's process does too; a time of zero
        # would not be compared with the machine's limit
        return float(max(run.run_ns, took_ns - (1 + MARGIN) * usual_ns, 1))

    def _compare(self, inputs: Inputs, run: UntrustedRun) -> None:
        assert self.check is not None, "only candidates are compared"
        before = [storage.clone() for storage in inputs.storages]
        outputs = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in self.call.results(run)]
        after = [tensor.clone() for tensor in tensors_in([*inputs.make()])] if self.mutates else []
        changed = False
        for storage, values in zip(inputs.storages, before, strict=True):
            changed = changed or not torch.equal(memory_of(storage), memory_of(values))
            storage.copy_(values)
        verdict = self.check(inputs, RunOutputs(outputs, after))
        if not verdict.right or (changed and not self.mutates):
            raise WrongResultError(f"in a timed run: {verdict.reason or 'writes into an argument'}")

    def _next_inputs(self, index: int) -> Inputs:
        # results, random numbers and changes of values must not be predictable
        torch.default_generator.manual_seed(secrets.randbits(62))
        inputs = self.draw(index, secrets.randbits(62))
        inputs.change(CHANGE)
        return inputs


def untrusted_call(case: Case, variant: Variant, workload: Workload) -> UntrustedCall:
    """Return the call of a candidate, or of the operator that it is compared with, in another process."""
    if case.operator is not None:
        raise Unsupported("--untrusted judges candidates for operators, not for functions")
    candidate = workload.candidates.find(case.op)
    for started in (None, candidate):
        # both start at the same time
        process_of(started, workload)
    return UntrustedCall(
        candidate if variant.mode == CANDIDATE else None, workload, case.signature, workload.context_of(case, variant)
    )


def untrusted_function(
    case: Case,
    operator: Operator,
    variant: Variant,
    inputs: Sequence[Inputs],
    call: UntrustedCall,
    draw: Callable[..., Inputs],
    overhead_ns: list[int],
) -> TimedFunction:
    """Return the timed function that runs a call in another process.

    draw : function that returns inputs for a signature, with values drawn for a seed
    overhead_ns : times in ns that requests to run the operator took outside its call; both functions share this list
    """
    signatures: Sequence[Signature] = (case.signature, *case.input_sets)
    tolerance = call.workload.request.tolerance

    def check(own: Inputs, actual: RunOutputs) -> ResultVerdict:
        reference = Reference(operator.function, own.copy_arguments, operator.mutates, case.op, case.unused)
        return reference.check(actual, tolerance)

    return UntrustedFunction(
        number=case.number,
        label=case.op,
        category=variant.label,
        function=call,
        input_sets=[InputSet([item]) for item in inputs],
        mutates=operator.mutates,
        fresh=None,
        result_bytes=0,
        row=variant.number,
        shares=shares_of(case),
        call=call,
        draw=lambda place, seed: draw(signatures[place], seed=seed),
        check=check if variant.mode == CANDIDATE else None,
        overhead_ns=overhead_ns,
    )
