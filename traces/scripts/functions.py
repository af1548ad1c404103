"""The functions that scripts define for themselves, each where one needs it."""

from __future__ import annotations

DATA = '''
def data(text, dtype, shape):
    """Values that were drawn when this file was made: deflated, in base64."""
    content = bytearray(zlib.decompress(base64.b64decode(text)))
    return torch.frombuffer(content, dtype=torch.uint8).view(dtype).reshape(shape)
'''
SAMPLED = '''
def sampled(text, dtype, sample_shape, shape):
    """Values whose rows are taken at random from those that were drawn when this file was made."""
    sample = data(text, dtype, sample_shape)
    count = math.prod(shape) // max(1, math.prod(sample_shape[1:]))
    return sample[torch.randint(len(sample), (count,))].reshape(shape)
'''
MIXED = '''
def mixed(values, counts):
    """The values, with others in random places: so many of each."""
    flat = values.reshape(-1).clone()
    places = torch.randperm(flat.numel())
    for value, count in counts:
        flat[places[:count]] = value
        places = places[count:]
    return flat.reshape(values.shape)
'''
BY_QUANTILES = '''
def by_quantiles(shape, dtype, probabilities, quantiles):
    """Random values whose distribution function goes straight from each quantile to the next."""
    knots, levels = (torch.tensor(numbers, dtype=torch.float64) for numbers in (probabilities, quantiles))
    at = torch.rand(shape, dtype=torch.float64)
    cell = torch.bucketize(at, knots[1:-1], right=True)
    part = (at - knots[cell]) / (knots[cell + 1] - knots[cell])
    return (levels[cell] * (1 - part) + levels[cell + 1] * part).to(dtype)
'''
WHOLE_NUMBERS = '''
def whole_numbers(shape, dtype, frequent, low, high):
    """Frequent values, each as often as it is said, and whole numbers from low to high, in random order."""
    count = math.prod(shape)
    values = torch.tensor([value for value, _ in frequent], dtype=torch.int64)
    values = values.repeat_interleave(torch.tensor([times for _, times in frequent], dtype=torch.int64))[:count]
    values = torch.cat([values, torch.randint(low, high + 1, (count - len(values),))])
    return values[torch.randperm(count)].to(dtype).reshape(shape)
'''
VIEW = '''
def view(memory, dtype, offset, shape, stride):
    """A tensor of that layout in some memory."""
    return torch.empty(0, dtype=dtype, device=memory.device).set_(memory, offset, shape, stride)
'''
FILL = '''
def fill(tensor, values):
    """Put values into a tensor; into elements that are one in memory, once."""
    shape = [1 if step == 0 else size for size, step in zip(tensor.shape, tensor.stride())]
    tensor.as_strided(shape, tensor.stride()).copy_(values[tuple(map(slice, shape))])
'''
FUNCTIONS = {
    "data": DATA,
    "sampled": DATA + "\n" + SAMPLED,
    "mixed": MIXED,
    "by_quantiles": BY_QUANTILES,
    "whole_numbers": WHOLE_NUMBERS,
    "view": VIEW,
    "fill": FILL,
}
"""Their sources by name."""

MAIN = '''
def tensors(tree):
    """All tensors in lists and tuples."""
    if isinstance(tree, torch.Tensor):
        return [tree]
    return [tensor for item in tree for tensor in tensors(item)] if isinstance(tree, (list, tuple)) else []


def timed(device, positional, named):
    """The time of one call, in us."""
    if torch.device(device).type != "cpu":
        torch.get_device_module(device).synchronize()
    begin = time.perf_counter_ns()
    OPERATOR(*positional, **named)
    if torch.device(device).type != "cpu":
        torch.get_device_module(device).synchronize()
    return (time.perf_counter_ns() - begin) / 1e3


@torch.no_grad()
def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default=RECORDED_DEVICE)
    parser.add_argument("--threads", type=int, default=RECORDED_THREADS)
    parser.add_argument("--repeats", type=int, default=20)
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    inputs = make_inputs(args.device)
    results = [(tuple(tensor.shape), tensor.dtype) for tensor in tensors(OPERATOR(*inputs[0], **inputs[1]))]
    for shape, dtype in results:
        print(f"result {str(dtype).removeprefix('torch.')}{list(shape)}")
    if RESULTS is not None:
        assert results == RESULTS, f"the trace has {RESULTS}"
    times = []
    for _ in range(args.repeats):
        if MUTATES:
            inputs = make_inputs(args.device)
        times.append(timed(args.device, *inputs))
    if times:
        print(f"median {statistics.median(times):,.1f} us, fastest {min(times):,.1f} us, of {len(times)} calls")


if __name__ == "__main__":
    main()
'''
