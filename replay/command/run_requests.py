"""The request that a job makes to the workers, and the checks of options that contradict each other."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from opgrip.cli.options import flag_of, refuse_options, words_in
from opgrip.cli.output_files import check_writable
from opgrip.cli.plugins import needed
from opgrip.errors import UserError
from opgrip.platform.machine import cache_folder
from opgrip.replay.analyses import analyses
from opgrip.replay.cases.selection import CALL, MODULE, PROGRAM
from opgrip.replay.cases.sources import source_of
from opgrip.replay.cases.sources.operator import target_of
from opgrip.replay.command.job import OperatorRequest, ReplayJob, job_from_keywords
from opgrip.replay.inputs.input_options import InputOptions
from opgrip.replay.modes import CANDIDATE, EAGER, ModeOptions
from opgrip.replay.modes.candidate import OF_MODULES, CandidateOptions
from opgrip.replay.reports import OutputOptions, report_for
from opgrip.replay.run.request import OPTION_GROUPS, RunRequest
from opgrip.replay.sequences.call_timers import check_mode
from opgrip.replay.sequences.step_options import SequenceOptions, launch_of
from opgrip.replay.timing.timing_options import DISCRETE, GRAPH, WARM, TimingOptions
from opgrip.replay.workers.executors import PROCESSES, EngineOptions


def request_of(job: ReplayJob) -> RunRequest:
    """Return the request that a job for one trace makes to workers, or raise `UserError` if its options contradict."""
    target = _target_of(job)
    source, launch, engine = source_of(target), launch_of(), job[EngineOptions]
    is_of_ranks = job.is_step and launch is not None
    if job.is_step:
        _check_step(job)
    if is_of_ranks and engine.sandbox:
        raise UserError(
            "--sandbox confines worker processes, but ranks run in processes of the launcher", "leave it out"
        )
    if not is_of_ranks:
        refuse_options(job.options, ("ranks",), "start them by torchrun, with --sequence")
    refuse_options(job.options, source.lacks, source.hint)
    if engine.engine != PROCESSES:
        # options that apply to a process on this machine only
        refuse_options(job.options, ("one trace",), f"leave it out with --engine {engine.engine}")
    if not source.in_program:
        caches = job[TimingOptions].cache
        if PROGRAM in caches:
            raise UserError(
                f"--cache program needs a trace of a program, which {target} is not", "use --cache warm or cold"
            )
        job = job.having(TimingOptions, cache=caches or (WARM,))
    return replace(options_of(job), trace=target, shard=engine.shard)


def request_with(trace: str | Path | None, **options: Any) -> RunRequest:
    return request_of(job_from_keywords(trace, options))


def _check_step(job: ReplayJob) -> None:
    modes = job[ModeOptions].mode
    in_graphs = job[TimingOptions].exec_mode == GRAPH and launch_of() is None
    others = job.having(TimingOptions, exec_mode=None) if in_graphs else job
    is_judged = job[SequenceOptions].accuracy
    if is_judged and (launch_of() is not None or in_graphs):
        raise UserError("--accuracy compares the step of one process, without graphs", "leave it out")
    if is_judged:
        others = job.having(InputOptions, dtype=None).having(CandidateOptions, candidate=())
    refuse_options(others.options, ("single cases",), "leave it out with --sequence")
    if job[InputOptions].is_spread:
        raise UserError("--sequence runs on one device", "name one with --device")
    if len(modes) > 1:
        raise UserError("--sequence runs under one mode", "name one with --mode")
    check_mode(modes[0], is_judged)
    if in_graphs and modes[0] != EAGER:
        raise UserError("--sequence --exec-mode graph runs all calls in eager", "leave out --mode")


def _target_of(job: ReplayJob) -> str:
    request, traces = job[OperatorRequest], job.traces
    if request.operator and traces:
        raise UserError("--operator cannot be combined with a trace", f"leave out {traces[0]}, or --operator")
    if request.operator:
        return target_of(request.operator, request.inputs, job[InputOptions].extension)
    if not traces:
        raise UserError("there is nothing to replay", "name a trace, samples, or an operator with --operator")
    if len(traces) > 1:
        raise UserError(f"exactly one trace can be replayed here, got {len(traces)}", "name one")
    return traces[0]


def options_of(job: ReplayJob) -> RunRequest:
    groups = {name: job.options[declared] for name, declared in OPTION_GROUPS.items()}
    sandbox = job[EngineOptions].sandbox
    if sandbox or job[OperatorRequest].operator:
        groups["inputs"] = replace(groups["inputs"], trust=True)
    request = RunRequest(
        **groups,
        detail=job.debug,
        # a later replay without a sandbox would load compiled programs that an untrusted trace could have changed
        store=None if sandbox else str(cache_folder()),
        count_work=any(analysis.counts_work for analysis in job.analyses),
        sandbox=sandbox,
    )
    request.timing.check()
    request.modes.check(request.tuning, in_graph=request.timing.exec_mode == GRAPH)
    request = replace(request, candidates=request.candidates.read())
    if request.candidates.candidate:
        request = _with_candidates(request)
    if request.candidates.untrusted:
        request = _with_untrusted(request)
    # fill in defaults, so that giving a default value does not change the request
    timing = replace(request.timing, cache=request.timing.caches)
    return replace(request, timing=timing, modes=replace(request.modes, mode=request.modes.all_names))


def check_output(job: ReplayJob) -> None:
    output = job[OutputOptions]
    path = output.output
    if path is None:
        return
    if output.list:
        raise UserError("--list runs no case and writes no results", "leave out --output")
    report = report_for(path)
    analysis = analyses.get(report.needs)
    if analysis is not None and analysis not in job.analyses:
        flag = flag_of(words_in(analysis.options)[0])
        hint = "end its name in .json" if job.is_step else f"add {flag}, or end its name in .json"
        raise UserError(f"{path} is for the results of {flag}, which is not given", hint)
    if output.append and report.read is None:
        raise UserError(f"rows cannot be added to {path}", "write .json or .csv")
    if report.package:
        needed(*report.package)
    check_writable(path, output.may_replace)


def _with_untrusted(request: RunRequest) -> RunRequest:
    names = {*request.modes.all_names} - {EAGER, CANDIDATE}
    refused = {
        "--backward": request.timing.backward,
        "--exec-mode": request.timing.exec_mode not in (None, DISCRETE),
        "--streams": any(point.streams > 1 for point in request.points),
        "--energy": request.energy.energy,
        "--sandbox": request.sandbox,
        f"--mode {','.join(sorted(names))}": bool(names),
    }
    for flag, is_used in refused.items():
        if is_used:
            raise UserError(f"--untrusted does not support {flag}", "leave it out")
    return replace(request, timing=request.timing.with_method(DISCRETE))


def _with_candidates(request: RunRequest) -> RunRequest:
    operators, modules, selection = request.candidates.operators, request.candidates.modules, request.selection
    if selection.op:
        raise UserError("--candidate selects the calls of its operator", "leave --op out")
    if modules:
        _check_modules(request)
        selection = replace(selection, module=modules)
    elif selection.unit != CALL:
        raise UserError(
            f"--candidate {operators[0]} is for single calls, not for --unit {selection.unit}",
            "leave --unit out, or judge a module: --unit module --candidate module:PATH=FILE.py:CLASS",
        )
    modes = replace(request.modes, mode=(*request.modes.mode, CANDIDATE))
    return replace(request, modes=modes, selection=replace(selection, op=operators, for_candidates=True))


def _check_modules(request: RunRequest) -> None:
    candidates, selection = request.candidates, request.selection
    named = f"--candidate {OF_MODULES}{candidates.modules[0]}"
    if selection.unit != MODULE:
        raise UserError(f"{named} is for modules as a whole", "add --unit module")
    if candidates.operators:
        raise UserError(
            f"{named} is for --unit module, unlike {candidates.operators[0]}",
            "judge modules and operators in separate runs",
        )
    refused = {
        "--module": bool(selection.module),
        "--untrusted": candidates.untrusted,
        "--confirm": candidates.confirm,
        "--streams": any(point.streams > 1 for point in request.points),
    }
    for flag, is_used in refused.items():
        if is_used:
            raise UserError(f"candidates for modules do not support {flag}", "leave it out")
