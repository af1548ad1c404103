"""Calls of candidates and operators in other processes: arguments go there, results come back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from opgrip.errors import UserError
from opgrip.replay.cases.functions import strided_spec
from opgrip.replay.checks.verdicts import WrongResultError
from opgrip.replay.inputs.filling import memory_of
from opgrip.replay.inputs.inputs import as_recorded
from opgrip.replay.modes.candidate import Candidate
from opgrip.replay.operators.lookup import Unsupported
from opgrip.replay.run.untrusted import PAGE, UntrustedProcess, end_process, process_of
from opgrip.replay.run.workload import Workload
from opgrip.traces.codec.record_forms import to_json
from opgrip.traces.rebuild import tensor_over
from opgrip.traces.schema.arguments import DTYPES, GeneratorSpec, TensorSpec, decode, encode, map_leaves
from opgrip.traces.schema.records import Signature

MOST_SIZE = 1 << 40  # largest size or stride of a result


@dataclass(frozen=True, slots=True)
class UntrustedRun:
    """One run of a call in another process.

    run_ns : time of the call as the process reported it
    overhead_ns : time in ns that the request took in addition, by this process's clock
    results : address and size of each result or, if a result is not a plain tensor, its value or type
    """

    run_ns: int
    overhead_ns: int
    results: Sequence[Any]


@dataclass(slots=True)
class UntrustedCall:
    """A call of a candidate, or of its operator, in another process."""

    candidate: Candidate | None
    workload: Workload
    signature: Signature
    settings: Mapping[str, Any]
    _places: list[tuple[int, torch.UntypedStorage]] = field(default_factory=list)

    def __call__(self, *args: Any, **kwargs: Any) -> list[Any]:
        return self.results(self.run(args, kwargs))

    def run(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> UntrustedRun:
        """Run the call on copies of the arguments in new memory.

        Raises the error of the call, and `WrongResultError` if its process was manipulated.
        """
        try:
            return self._run(args, kwargs)
        except (UserError, WrongResultError):
            # the process may have ended, or send further messages
            end_process(self.candidate)
            raise

    def results(self, run: UntrustedRun) -> list[Any]:
        """Return the results of the last run, and give its arguments the values that the run left in them."""
        process = process_of(self.candidate, self.workload)
        for offset, storage in self._places:
            memory_of(storage).copy_(process.shared(offset, storage.nbytes()))
        try:
            # before the process continues: later work must not become a result
            memory = self._memory(process, run.results)
            described = process.ask({"do": "describe"})
            if replaced := described["replaced"]:
                raise WrongResultError(f"replaces {', '.join(map(str, replaced))}")
            return self._outputs(run.results, described["outputs"], memory)
        except WrongResultError:
            raise
        except (KeyError, TypeError, ValueError, AttributeError, RuntimeError, IndexError, OverflowError) as error:
            raise WrongResultError(f"its results cannot be read: {error}") from error

    def _run(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> UntrustedRun:
        process = process_of(self.candidate, self.workload)
        storages: dict[int, torch.UntypedStorage] = {}
        form_args, form_kwargs = ([_leaf(item, storages) for item in args], _leaf(dict(kwargs), storages))
        sizes = [-(-storage.nbytes() // PAGE) * PAGE for storage in storages.values()]
        first = process.place(sum(sizes))
        offsets = [first + sum(sizes[:number]) for number in range(len(sizes))]
        self._places = list(zip(offsets, storages.values(), strict=True))
        request = {
            "do": "make",
            "args": encode(form_args),
            "kwargs": encode(form_kwargs),
            "places": [[offset, storage.nbytes(), str(storage.device)] for offset, storage in self._places],
            "size": len(process.memory),
            "signature": to_json(self.signature) if self.candidate is None else None,
            "settings": {**self.settings, "grad": torch.is_grad_enabled()},
        }
        process.ask(request)
        for offset, storage in self._places:
            process.shared(offset, storage.nbytes()).copy_(memory_of(storage))
        answer = process.ask({"do": "run", "seed": torch.initial_seed()})
        if not isinstance(answer, list) or not answer or type(answer[0]) is not int:
            raise WrongResultError("its process did not send the time and the addresses of its results")
        run_ns, *results = answer
        if not 0 <= run_ns <= process.took_ns:
            raise WrongResultError(f"its process reports a time of {run_ns} ns, but ran for {process.took_ns} ns")
        process.earlier, process.latest = process.latest, results
        return UntrustedRun(run_ns, process.took_ns - run_ns, results)

    def _memory(self, process: UntrustedProcess, results: Sequence[Any]) -> list[torch.UntypedStorage | None]:
        mapped, own = process.mapped_at(), dict[int, torch.UntypedStorage]()
        storages: list[torch.UntypedStorage | None] = []
        for item in results:
            if isinstance(item, dict):
                storages.append(None)
                continue
            address, size = item
            offset = next((address - first + at for first, end, at in mapped if first <= address < end), None)
            if offset is not None:
                storages.append(self._places[[place for place, _ in self._places].index(offset)][1])
                continue
            if size and item in process.earlier:
                raise WrongResultError("returns the memory of an earlier result")
            if address not in own:
                own[address] = process.read(address, size).untyped_storage()
            storages.append(own[address])
        return storages

    def _outputs(
        self, results: Sequence[Any], forms: Sequence[Mapping[str, Any]], memory: Sequence[torch.UntypedStorage | None]
    ) -> list[Any]:
        outputs = []
        for item, form, storage in zip(results, forms, memory, strict=True):
            if storage is None:
                if "value" not in item:
                    raise WrongResultError(f"output is a {item['type']}, not a plain tensor")
                outputs.append(decode(item["value"]))
                continue
            spec, number = _spec(form, storage.nbytes()), form["argument"]
            moved = memory_of(storage).to(spec.device).untyped_storage() if number is None else self._places[number][1]
            outputs.append(as_recorded(tensor_over(moved, spec), spec))
        return outputs


def _spec(form: Mapping[str, Any], size: int) -> TensorSpec:
    shape, stride, offset = tuple(form["shape"]), tuple(form["stride"]), form["offset"]
    numbers = (*shape, *stride, offset)
    if any(type(number) is not int or not 0 <= number <= MOST_SIZE for number in numbers):
        raise WrongResultError(
            f"the sizes, strides or offset of a result are negative or too large: {str(numbers)[:60]}"
        )
    conj, neg = form["bits"]
    device = str(torch.device(form["device"]))
    spec = TensorSpec(shape, stride, DTYPES[form["dtype"]], device, offset=offset, conj=bool(conj), neg=bool(neg))
    if spec.extent > size:
        raise WrongResultError(f"a result of shape {shape} needs {spec.extent} bytes, but its memory has {size}")
    return spec


def _leaf(tree: Any, storages: dict[int, torch.UntypedStorage]) -> Any:
    def described(leaf: Any) -> Any:
        if isinstance(leaf, torch.Generator):
            return GeneratorSpec(str(leaf.device), leaf.initial_seed())
        if not isinstance(leaf, Tensor):
            return leaf
        if leaf.layout is not torch.strided or leaf.is_nested or leaf.is_quantized:
            raise Unsupported("--untrusted passes strided tensors only")
        storage = leaf.untyped_storage()
        storages.setdefault(storage._cdata, storage)
        number = list(storages).index(storage._cdata)
        return strided_spec(leaf, storage=number, conj=leaf.is_conj(), neg=leaf.is_neg())

    return map_leaves(described, tree)
