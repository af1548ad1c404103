"""What becomes of each field of the format. A test holds it against the schema, so that no new field is forgotten.

A field that stands nowhere here does not go out: each record is made anew of the fields that `redaction.py` names.
"""

from __future__ import annotations

TREATMENTS: dict[str, str] = {
    # numbers that records refer to each other by, counts, times since the start, shapes and flags
    "stays": """
        header.page_size header.threads header.warmup header.steps header.rank header.world_size
        header.clocks header.clocks.processes header.clocks.processes.offset_ns
        header.clocks.processes.measured_ns header.clocks.processes.spread_ns
        header.clocks.processes.collectives signature.id observed.signature observed.since_ns
        observed.storage scope.id scope.context scope.forward scope.gripped thread.id thread.process
        calls.thread calls.start_ns calls.signature calls.scope calls.after_ns calls.duration_ns
        calls.tensors calls.newest calls.storages calls.device_ns calls.page_faults calls.streams
        calls.perturbed calls.slow_memory end.contended end.calls end.before end.thinned.values end.thinned.scopes
        end.thinned.steps end.step_starts_ns end.signatures end.duration_ns end.dropped.count
        end.without_values.count end.passed_by.count entered.thread entered.start_ns
        entered.scope entered.signature context.id
        effects.signature effects.operators effects.operator_ns device_times.thread device_times.first
        device_times.device_ns kernels.signature kernels.launches kernels.device_ns argument.size
        argument.group.ranks argument.group.rank argument.shared.id argument.same argument.ellipsis
        tensor.shape tensor.stride tensor.offset tensor.requires_grad tensor.storage tensor.conj tensor.neg
        tensor.pinned made_of.coo.coalesced made_of.per_channel.axis made_of.nested.sizes
        made_of.nested.strides made_of.nested.offsets values.true values.total values.others
        values.ascending values.first values.whole values.zeros values.nan values.inf values.minus_inf
        special_float.float
    """,
    # words of the format, of torch and of the system; what is in no list of these is hashed or left out
    "public words": """
        header.type header.format header.version header.opgrip header.torch header.python header.platform
        header.devices header.device header.clocks.by signature.type signature.kind observed.type scope.type
        scope.phase values.type values.model thread.type calls.type end.type end.devices end.stopped
        context.type context.settings entered.type effects.type device_times.type kernels.type
        argument.dtype argument.device argument.layout argument.memory_format argument.generator.device
        argument.opaque argument.group.backend argument.reduction argument.numpy_scalar.dtype tensor.dtype
        tensor.device tensor.layout accelerator.devices accelerator.devices.*.name
        accelerator.devices.*.capability accelerator.devices.*.architecture accelerator.devices.*.driver
        accelerator.devices.*.memory_bytes accelerator.devices.*.l2_bytes
        accelerator.devices.*.multiprocessors accelerator.devices.*.power_limit_w
        accelerator.devices.*.max_sm_mhz accelerator.devices.*.max_memory_mhz accelerator.devices.*.ecc
        accelerator.devices.*.mig accelerator.libraries accelerator.settings accelerator.settings.attention
        accelerator.settings.allow_fp16_reduced_precision_reduction
        accelerator.settings.allow_bf16_reduced_precision_reduction
        accelerator.settings.allow_fp16_accumulation accelerator.settings.fp32_precision
        accelerator.settings.allocator
    """,
    # by a secret salt: names of torch's classes, of Python's and of public operators stay
    "salted": """
        header.model signature.raised scope.module scope.module_type scope.function scope.file scope.line
        scope.callers thread.name end.dropped.reason end.without_values.reason end.passed_by.reason
        argument.group.name argument.object.class argument.module.class argument.named tensor.cls
    """,
    # those of torch stay, custom ones unless `--hide-operators` has them hashed; gripped functions' are hashed
    "operators": """
        signature.op scope.inside end.dropped.op end.without_values.op end.passed_by.op kernels.names
    """,
    "coarse": """
        argument.slice argument.range complex.complex made_of.per_tensor.scale made_of.per_tensor.zero_point
        made_of.per_channel.scales made_of.per_channel.zero_points values.data values.frequent values.low
        values.high values.mean values.std
    """,
    "moved": "header.started_unix_ns argument.generator.seed argument.bytes values.id tensor.values observed.values",
    # what stands in them is redacted in its turn
    "parts": """
        header.processes header.accelerator end.accelerator end.thinned end.dropped end.without_values end.passed_by
        signature.args signature.kwargs signature.outputs observed.outputs entered.opened effects.after
        argument.tuple argument.dict argument.generator argument.tensor argument.group argument.object
        argument.object.fields argument.object.content argument.module argument.module.parameters
        argument.module.buffers argument.module.modules argument.module.fields argument.numpy
        argument.numpy_scalar argument.numpy_scalar.value argument.shared argument.shared.value argument.set
        argument.frozenset tensor.made_of made_of.coo made_of.coo.indices made_of.coo.values
        made_of.coo.rows made_of.compressed made_of.compressed.compressed made_of.compressed.plain
        made_of.compressed.values made_of.per_tensor made_of.per_channel made_of.nested
        made_of.nested.buffer
    """,
    "left out": """
        header.time header.command header.pid header.seed header.parent_pid header.values_file
        header.distilled header.distilled.method header.distilled.keys header.distilled.traces
        header.distilled.traces.*.cases header.distilled.traces.*.us values.tensor effects.random_state
        accelerator.settings.environment
    """,
}
"""Fields of the schema by what becomes of them."""

LEFT_OUT = frozenset(TREATMENTS["left out"].split())


def treatment_of(field: str) -> str | None:
    """What becomes of a field, such as `scope.module`; None where nobody has decided."""
    return next((treatment for treatment, fields in TREATMENTS.items() if field in fields.split()), None)
