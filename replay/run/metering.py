"""Energy of the cases of a replay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from opgrip.errors import UserError
from opgrip.replay.operators.contexts import restored
from opgrip.replay.operators.devices import check_use, synchronizer
from opgrip.replay.results.results import Result
from opgrip.replay.run.energy import Energy, open_meter
from opgrip.replay.run.settings import Settings
from opgrip.replay.timing.rounds import Announce, Group


def metered(number: int, groups: Sequence[Group], settings: Settings, announce: Announce) -> dict[int, Energy]:
    """What a run of each subject of a case takes of the device, by the subjects' identity, without those that fail.

    Empty where the device tells nothing any more.

    Parameters
    ----------
    number : of the case
    """
    wait = synchronizer(settings.device)
    energy_of_subject: dict[int, Energy] = {}
    try:
        meter = open_meter(settings.device)
    except UserError:
        return energy_of_subject
    try:
        for group in groups:
            with restored(group.settings), torch.set_grad_enabled(group.grad):
                for subject in group.subjects:
                    if subject.number != number or subject.failure is not None:
                        continue
                    announce(subject.number, subject.row)
                    try:
                        energy_of_subject[id(subject)] = meter.measure(subject.run, wait)
                    except Exception as error:
                        check_use(settings.device, error)
                        subject.fail(error, settings.device)
    finally:
        meter.close()
    return energy_of_subject


def with_energy(row: Result, energy: Energy | None) -> Result:
    """A row with what its runs took."""
    if energy is None:
        return row
    clock_mhz = row.clock_mhz if energy.clock_mhz is None else energy.clock_mhz
    return replace(row, clock_mhz=clock_mhz, throttled=", ".join(energy.throttled) or None).adding(energy.columns)
