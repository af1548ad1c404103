"""First contact with a real GPU: what is worth most first, each fact on disk as soon as it is known.

    python first_contact.py drive first|second --out DIR --seconds 285 [--device cuda] [--tiny] [--only a,b]

A stage is a process of its own, started while the one before it runs (it imports, uses no GPU, and waits for a word on
stdin), ended with its group at its limit. DIR gets at most six files: facts.jsonl (a line a fact, flushed), log.txt,
raw*.zip (traces, rows, tables: appended after each stage, always whole), done.txt. Nothing is judged here.
"""
from __future__ import annotations

import argparse, contextlib, json, os, re, signal, statistics, subprocess, sys, tempfile, time, traceback, zipfile
from pathlib import Path

HERE = Path(__file__).resolve()
PLANS = {  # name: (limit in s, least that must be left)
    "first": {"facts": (40, 10), "clocks": (60, 20), "program:bert": (70, 35), "replay:bert": (60, 20),
              "program:llama": (70, 35), "replay:llama": (60, 20), "program:resnet": (70, 35), "replay:resnet": (60, 20),
              "sequence:bert": (60, 20), "program:detector": (60, 30), "replay:detector": (60, 20)},
    "second": {"zoo": (230, 60), "modes:bert": (120, 40), "ncu:llama": (80, 40), "failures": (90, 40),
               "roofline": (70, 40), "graph:llama": (50, 20), "sequence:llama": (50, 20), "program:gpt2": (60, 35),
               "replay:gpt2": (50, 20)},
}
NEEDS_TRACE = ("replay", "sequence", "modes", "ncu", "graph")


# ---------------------------------------------------------------- the driver: uses no GPU itself
def drive(args):
    out = Path(args.out); out.mkdir(parents=True, exist_ok=True)
    work = Path(args.work); work.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + args.seconds
    log = (out / "log.txt").open("ab", buffering=0)
    plan = [(name, *limits) for name, limits in PLANS[args.plan].items()
            if not args.only or name.split(":")[0] in args.only or name in args.only]
    if args.plan == "second":  # a fresh machine has no traces: make those that its stages need first
        lacking = [f"program:{m}" for m in dict.fromkeys(n.split(":")[1] for n, *_ in plan if n.split(":")[0] in NEEDS_TRACE)
                   if not (work / f"{m}.jsonl").exists() and not any(n == f"program:{m}" for n, *_ in plan)]
        plan = [plan[0], *((name, 60, 30) for name in lacking), *plan[1:]] if plan else plan
    # without persistence mode the driver goes down with the last process that holds the GPU: hold it
    holder = None
    if args.device.startswith("cuda"):
        holder = subprocess.Popen([sys.executable, "-c", "import torch,time; torch.zeros(1,device='cuda'); print('held',flush=True); time.sleep(900)"],
                                  stdout=subprocess.DEVNULL, stderr=log, start_new_session=True)
    waiting = {}

    def start(name):
        words = [sys.executable, str(HERE), "stage", name, "--work", str(work), "--device", args.device, "--out", str(out)]
        return subprocess.Popen(words + (["--tiny"] if args.tiny else []), stdin=subprocess.PIPE, stdout=log, stderr=log,
                                start_new_session=True, env=os.environ | {"PYTHONUNBUFFERED": "1"})

    try:
        for place, (name, limit, least) in enumerate(plan):
            left = end - time.monotonic()
            if left < least:
                note(out, name, {"skipped": f"{left:.0f} s are left"}); continue
            process = waiting.pop(name, None) or start(name)
            log.write(f"\n===== {name} at {args.seconds - left:.0f} s\n".encode())
            began = time.monotonic()
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(b"go\n"); process.stdin.close()
            nxt = next((n for n, _, l in plan[place + 1:] if end - time.monotonic() > l), None)
            if nxt:
                waiting[nxt] = start(nxt)  # imports meanwhile
            try:
                status = process.wait(min(limit, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                status = "timeout"
            kill(process)
            note(out, name, {"status": status, "seconds": round(time.monotonic() - began, 1)})
            pack(out, work)
    finally:
        for process in [*waiting.values(), *([holder] if holder else [])]:
            kill(process)
        pack(out, work)
        (out / "done.txt").write_text("done\n")
    table(out)
    return 0


def kill(process):
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def note(out, stage, facts):
    with (Path(out) / "facts.jsonl").open("a") as file:
        file.write(json.dumps({"stage": stage, "at": round(time.time(), 1), **facts}, default=str) + "\n")
        file.flush(); os.fsync(file.fileno())


def pack(out, work):
    """Add what is new below the work folder; a file over 4 MB goes to the second archive, over 40 MB nowhere."""
    for path in sorted(work.glob("*")):
        if not path.is_file() or path.suffix in (".tmp", ".unfinished") or path.stat().st_size > 40 << 20:
            continue
        target = next(out / name for name in ("raw.zip", "raw-2.zip", "raw-3.zip")
                      if name == "raw-3.zip" or not (out / name).exists() or (out / name).stat().st_size < 10 << 20)
        mark = f"{path.name}@{path.stat().st_mtime_ns}"
        with zipfile.ZipFile(target, "a", zipfile.ZIP_DEFLATED) as archive:
            names = archive.namelist()
            if mark in {archive.getinfo(n).comment.decode() for n in names}:
                continue
            info = zipfile.ZipInfo(path.name if path.name not in names else f"{time.time():.0f}-{path.name}")
            info.comment, info.compress_type = mark.encode(), zipfile.ZIP_DEFLATED
            archive.writestr(info, path.read_bytes())


def table(out):
    for line in (Path(out) / "facts.jsonl").read_text().splitlines():
        fact = json.loads(line); fact.pop("at")
        text = json.dumps(fact)
        print(text if len(text) < 400 else text[:400] + "…")


# ---------------------------------------------------------------- stages
def stage(args):
    global torch, DEVICE, KIND, MODULE, WORK, OUT, TINY
    import torch as torch_
    import opgrip.capture, opgrip.replay  # noqa
    if args.name.startswith("program:") and args.name.split(":")[1] in ("bert", "llama", "gpt2"):
        import transformers  # noqa
    torch = torch_
    DEVICE, WORK, OUT, TINY = args.device, Path(args.work), args.out, args.tiny
    KIND = torch.device(DEVICE).type
    MODULE = getattr(torch, KIND)
    if sys.stdin.readline().strip() != "go":
        return 1
    kind, _, what = args.name.partition(":")
    try:
        STAGES[kind](*([what] if what else []))
    except BaseException as error:
        traceback.print_exc()
        note(OUT, args.name, {"error": f"{type(error).__name__}: {error}"[:500]})
        return 1
    return 0


def say(stage_name, **facts):
    note(OUT, stage_name, facts)


def sync():
    if KIND != "cpu":
        MODULE.synchronize()


def warm(seconds=0.6):
    if KIND == "cpu" or TINY:
        return
    x = torch.randn(4096, 4096, device=DEVICE, dtype=torch.bfloat16); end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        for _ in range(20):
            torch.mm(x, x)
        sync()


def facts():
    began = time.perf_counter(); torch.zeros(1, device=DEVICE); sync()
    said = {"context_s": time.perf_counter() - began, "torch": torch.__version__, "python": sys.version.split()[0], "cores": os.cpu_count()}
    if KIND == "cuda":
        fields = "name,driver_version,clocks.sm,clocks.max.sm,clocks.mem,power.draw,power.limit,temperature.gpu,persistence_mode,compute_mode,ecc.mode.current,mig.mode.current"
        done = subprocess.run(["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"], capture_output=True, text=True)
        p = torch.cuda.get_device_properties(0)
        said |= {"smi": done.stdout.strip(), "l2": p.L2_cache_size, "sm": p.multi_processor_count, "uuid_type": type(p.uuid).__name__}
        import importlib.util as u
        said["packages"] = {n: u.find_spec(n) is not None for n in ("nvtx", "zstandard", "pynvml", "mmcv", "triton", "jax", "transformers", "timm")}
        import shutil
        said["tools"] = {n: shutil.which(n) for n in ("nsys", "ncu", "nvcc", "gcc", "g++", "ninja")}
        warm()
        # how many cycles of _sleep are a microsecond; what two events read of nothing; what a launch costs the host
        def between(run, n=50):
            times = []
            for _ in range(n):
                a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                a.record(); run(); b.record(); b.synchronize(); times.append(a.elapsed_time(b) * 1e3)
            return statistics.median(times)
        said["sleep_2M_cycles_us"] = between(lambda: torch.cuda._sleep(2_000_000), 10)
        said["empty_events_us"] = between(lambda: None)
        one = torch.ones(1, device=DEVICE)
        for name, run in {"launch_us": lambda: one + 1, "event_record_us": None, "current_stream_us": lambda: torch.cuda.current_stream()}.items():
            if name == "event_record_us":
                e, s = torch.Event(device=torch.device("cuda:0"), enable_timing=True), torch.cuda.current_stream()
                run = lambda: e.record(s)
            for _ in range(200): run()
            sync(); began = time.perf_counter()
            for _ in range(500): run()
            said[name] = (time.perf_counter() - began) / 500 * 1e6; sync()
        from opgrip.capture.timing.device_time import DeviceTimer
        timer, number = DeviceTimer(), iter(range(10**9))
        timed = timer.timed(lambda: None, torch.device("cuda:0"), lambda: next(number))
        for _ in range(200): timed()
        timer.times_ns(list(timer._open)); sync(); began = time.perf_counter()
        for _ in range(500): timed()
        said["two_marks_us"] = (time.perf_counter() - began) / 500 * 1e6
        began = time.perf_counter(); timer.times_ns(list(timer._open)); said["read_marks_us"] = (time.perf_counter() - began) / 500 * 1e6
        x, y = torch.empty(1 << 30, dtype=torch.uint8, device=DEVICE), torch.empty(1 << 30, dtype=torch.uint8, device=DEVICE)
        said["copy_GBps"] = 2 * x.nbytes / between(lambda: y.copy_(x), 10) / 1e3
        m = torch.randn(8192, 8192, device=DEVICE, dtype=torch.bfloat16)
        said["bf16_TFLOPs"] = 2 * 8192**3 / between(lambda: torch.mm(m, m), 10) / 1e6
    say("facts", **said)


def suite():
    g = lambda *s, d=torch.bfloat16: torch.randn(*s, device=DEVICE, dtype=d)
    n = 64 if TINY else 1
    x, big, q = g(1024 // n, 1024 // n), g(8192 // n, 8192 // n), g(4, 16, 2048 // n, 64)
    im, w = g(64 // n or 1, 256, 56, 56), g(256, 256, 3, 3)
    ids = torch.randint(0, 1000, (8192 // n,), device=DEVICE); emb = g(1000, 1024)
    one = torch.ones(1, device=DEVICE)
    f32 = g(2048 // n, 2048 // n, d=torch.float32)
    return {"add_1": lambda: one + 1, "add_1M": lambda: x + x, "mm_1024": lambda: torch.mm(x, x), "mm_8192": lambda: torch.mm(big, big),
            "mm_f32_2048": lambda: torch.mm(f32, f32), "gelu_64M": lambda: torch.nn.functional.gelu(big), "softmax": lambda: torch.softmax(big, -1),
            "layer_norm": lambda: torch.native_layer_norm(big, [big.shape[-1]], None, None, 1e-5), "sum": lambda: big.sum(0),
            "sdpa": lambda: torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True),
            "conv": lambda: torch.conv2d(im, w, padding=1), "embedding": lambda: torch.embedding(emb, ids),
            "sort": lambda: torch.sort(f32.view(-1)), "topk": lambda: torch.topk(f32, 16), "nonzero": lambda: (f32 > 2).nonzero(), "cat": lambda: torch.cat([x, x, x])}


def kineto(run, runs=20):
    """Per run: time of kernels and fills, how many, and from the first's start to the last's end; None without records."""
    if KIND != "cuda":
        return None
    from torch.profiler import ProfilerActivity, profile
    with profile(activities=[ProfilerActivity.CUDA]) as p:
        for _ in range(runs):
            run(); sync()
    events = sorted((e for e in p.profiler.kineto_results.events() if e.device_type().name == "CUDA" and not e.is_user_annotation()), key=lambda e: e.start_ns())
    if not events or len(events) % runs:
        return {"us": sum(e.duration_ns() for e in events) / runs / 1e3, "kernels": len(events) / runs, "even": False}
    each = len(events) // runs
    parts = [events[k * each:(k + 1) * each] for k in range(runs)]
    return {"us": statistics.median(sum(e.duration_ns() for e in p_) for p_ in parts) / 1e3, "kernels": each,
            "span_us": statistics.median(p_[-1].start_ns() + p_[-1].duration_ns() - p_[0].start_ns() for p_ in parts) / 1e3}


def clocks():
    """Each way to time a call, beside the device's own records of its kernels."""
    from opgrip.capture import Capture
    from opgrip.replay.operators.devices import synchronizer, use_device, with_index
    from opgrip.replay.timing.stopwatch import empty_call_ns
    from opgrip.replay.timing.ranges import Range
    from opgrip.replay.timing.stopwatch import Stopwatch
    from opgrip.traces import load
    device = with_index(DEVICE); use_device(device); wait = synchronizer(device); warm()
    span, runs = Range("m", "c", 0), suite()

    def by(method, run, margin_ns):
        watch, lead, times, launches = Stopwatch(method, wait, empty_call_ns(wait), device), 0.0, [], []
        graph = None
        if method == "graph":
            graph = watch.capture(run, [((), {})])
        for _ in range(40):
            times.append((watch.time_graph(graph, 1, span) if graph else watch.time(run, [((), {})], span, lead + margin_ns)) / 1e3)
            lead = watch.launch_ns; launches.append(lead / 1e3)
        rest = times[5:]
        return {"us": statistics.median(rest), "p90": sorted(rest)[int(.9 * len(rest))], "launch_us": statistics.median(launches[5:]), "last_launch_us": launches[-1]}

    for name, run in runs.items():
        row = {"call": name}
        try:
            for _ in range(3): run()
            sync(); row["kineto"] = kineto(run)
            for label, method, margin in (("events", "events", 0), ("events+20us", "events", 20_000), ("discrete", "discrete", 0)):
                row[label] = by(method, run, margin)
            if name != "nonzero" and KIND == "cuda":
                row["graph"] = by("graph", run, 0)
        except BaseException as error:
            row["error"] = f"{type(error).__name__}: {error}"[:200]
        say("clocks", **row)
    for way in ("events", "kernels") if KIND == "cuda" else ("events",):
        path = WORK / f"clocks-{way}.jsonl"; path.unlink(missing_ok=True)
        with Capture(path, device_time=way) as capture:
            for _ in range(20):
                for name, run in runs.items(): run()
        calls = load(path, partial=False).calls
        calls["us"] = calls["device_ns"] / 1e3
        say("clocks", capture=way, dropped=capture.dropped, by_op={op: round(float(t), 2) for op, t in calls.groupby("op", observed=True)["us"].median().items()})


def program(name):
    """A step function of a model at a size for a GPU."""
    torch.manual_seed(0)
    dtype = torch.bfloat16
    if name == "resnet":
        import torchvision
        model = torchvision.models.resnet50() if not TINY else torchvision.models.resnet18()
        model = model.to(DEVICE, dtype).to(memory_format=torch.channels_last).train()
        images = torch.randn(*((2, 3, 64, 64) if TINY else (256, 3, 224, 224)), device=DEVICE, dtype=dtype).to(memory_format=torch.channels_last)
        labels = torch.randint(0, 1000, (len(images),), device=DEVICE)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
        loss = lambda: torch.nn.functional.cross_entropy(model(images).float(), labels)
    elif name == "detector":
        from opgrip.capture.models.program import ModelOptions, load_program
        made = load_program("builtin:faster_rcnn", ModelOptions(run="predict", device=DEVICE, batch_size=1 if TINY else 8, input_size=(96, 96) if TINY else (512, 512)))
        inputs = made.inputs()
        return lambda: (torch.manual_seed(1), made.step(inputs))
    else:
        import transformers as t
        if name == "bert":
            sizes = dict(num_hidden_layers=2, hidden_size=64, num_attention_heads=2, intermediate_size=128) if TINY else {}
            model, shape = t.BertForMaskedLM(t.BertConfig(**sizes)), (2, 16) if TINY else (32, 512)
        elif name == "gpt2":
            sizes = dict(n_layer=2, n_embd=64, n_head=2) if TINY else {}
            model, shape = t.GPT2LMHeadModel(t.GPT2Config(**sizes)), (2, 16) if TINY else (16, 1024)
        else:
            sizes = dict(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=128, vocab_size=500) if TINY else \
                dict(hidden_size=2048, num_hidden_layers=8, num_attention_heads=16, num_key_value_heads=4, intermediate_size=5632, vocab_size=32000)
            model, shape = t.LlamaForCausalLM(t.LlamaConfig(**sizes)), (2, 16) if TINY else (4, 2048)
        model = model.to(DEVICE, dtype).train()
        words = torch.randint(0, model.config.vocab_size, shape, device=DEVICE)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=KIND == "cuda")
        loss = lambda: model(input_ids=words, labels=words).loss

    def step():
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()
    return step


def programs(name):
    """What each observer costs a step, and what it says of it."""
    from torch.profiler import ExecutionTraceObserver, ProfilerActivity, profile
    from opgrip.capture import Capture
    from opgrip.traces import load
    step, steps, label = program(name), 3 if TINY else 6, f"program:{name}"
    for _ in range(4): step()
    sync()
    trace_path = WORK / f"{name}.jsonl"

    @contextlib.contextmanager
    def execution_trace():
        observer = ExecutionTraceObserver().register_callback(str(WORK / f"{name}-eto.tmp")); observer.start()
        yield
        observer.stop(); observer.unregister_callback()

    @contextlib.contextmanager
    def profiler(both=True):
        acts = [ProfilerActivity.CUDA] if KIND == "cuda" else []
        with profile(activities=acts + ([ProfilerActivity.CPU] if both or not acts else [])) as kept:
            yield kept

    def fresh(path):
        path.unlink(missing_ok=True); return path

    observers = {"native": contextlib.nullcontext, "eto": execution_trace, "profiler cuda": lambda: profiler(False), "profiler cpu+cuda": profiler,
                 "opgrip events": lambda: Capture(fresh(WORK / f"{name}-events.jsonl"))}
    if KIND == "cuda":
        observers["opgrip kernels"] = lambda: Capture(fresh(trace_path), device_time="kernels")
    else:
        observers["opgrip events"] = lambda: Capture(fresh(trace_path))
    observers["native again"] = contextlib.nullcontext
    for observer, make in observers.items():
        if KIND == "cuda": torch.cuda.reset_peak_memory_stats()
        times = []
        try:
            with make() as kept:
                for _ in range(steps):
                    sync(); began = time.perf_counter(); step(); sync()
                    times.append((time.perf_counter() - began) * 1e3)
                closing = time.perf_counter()
            closing = time.perf_counter() - closing
        except Exception as error:
            traceback.print_exc(); say(label, observer=observer, error=str(error)[:300]); continue
        say(label, observer=observer, first_ms=times[0], later_ms=statistics.median(times[2:] or times), all_ms=times, closing_s=closing,
            peak_GB=torch.cuda.max_memory_allocated() / 1e9 if KIND == "cuda" else None)
        if observer == "profiler cpu+cuda" and KIND == "cuda":
            table = {a.key: [a.count / steps, a.device_time_total / steps, a.self_device_time_total / steps] for a in kept.key_averages() if a.device_time_total}
            (WORK / f"{name}-kineto.json").write_text(json.dumps(table))
            say(label, kernels_ms=sum(v[2] for v in table.values()) / 1e3)
    for way, path in (("events", WORK / f"{name}-events.jsonl"), ("kernels", trace_path)):
        if not path.exists(): continue
        trace = load(path, partial=False)
        calls = trace.own_calls if hasattr(trace, "own_calls") else trace.calls
        us = calls.assign(us=calls["device_ns"] / 1e3)
        records = [json.loads(l) for l in path.read_text().splitlines()[-1:]]
        from opgrip.traces.schema.arguments import tensors
        specs = [spec for s in trace.signatures for spec in tensors([s.args, s.kwargs])]
        known = sum(spec.values is not None and spec.values in trace.values for spec in specs)
        say(label, trace=way, calls=len(calls), signatures=len(trace.signatures), bytes=path.stat().st_size, untimed=int(us["us"].isna().sum()),
            device_ms_per_step=float(us["us"].sum()) / steps / 1e3, tensors=len(specs), tensors_with_values=known,
            dropped=records[0].get("dropped"), without_values=records[0].get("without_values"))
        (WORK / f"{name}-{way}-by-op.json").write_text(us.groupby("op", observed=True)["us"].agg(["count", "sum", "median"]).to_json(orient="index"))


def rows_of(name, label, **options):
    from opgrip.replay import replay
    began = time.perf_counter()
    results = replay(WORK / f"{name}.jsonl", device=DEVICE, **options)
    took = time.perf_counter() - began
    with contextlib.suppress(Exception):
        results.save(WORK / f"{label.replace(':', '-')}.json", force=True)
    return results, took


def compare(label, results, took, **more):
    frame = results.frame
    ok = frame[(frame["status"] == "ok") & frame["median_us"].notna() & (frame["captured_us"] > 0)]
    weight = (ok["count"] * ok["captured_us"]).sum()
    error = (ok["count"] * (ok["median_us"] - ok["captured_us"]).abs()).sum() / weight if weight else None
    ratio = (ok["count"] * ok["median_us"]).sum() / weight if weight else None
    spread = ((ok["p90_us"] - ok["p10_us"]) / ok["median_us"]).median() if len(ok) else None
    bad = frame[frame["status"] != "ok"][["op", "status", "error"]].head(12).values.tolist()
    say(label, seconds=took, rows=len(frame), per_s=len(frame) / took, statuses=frame["status"].value_counts().to_dict(), error=error, total_ratio=ratio,
        spread=spread, mean_over_median=float((ok["mean_us"] / ok["median_us"]).median()) if len(ok) else None, bad=bad,
        stopped=frame["stopped"].value_counts().to_dict() if "stopped" in frame else None, clock=ok["clock_mhz"].describe().to_dict() if "clock_mhz" in ok else None, **more)


def replays(name):
    compare(f"replay:{name}", *rows_of(name, f"replay:{name}", budget=0.05 if TINY else 0.1, timeout=30, **({"top": 10} if TINY else {})))


def graph(name):
    compare(f"graph:{name}", *rows_of(name, f"graph:{name}", exec_mode="graph", budget=0.1, timeout=30, top=60))


def modes(name):
    for mode in ("cudagraph", "compile", "reduce-overhead"):
        results, took = rows_of(name, f"modes:{name}-{mode}", mode=[mode], budget=0.1, timeout=40, top=3 if TINY else 24)
        frame = results.frame
        say(f"modes:{name}", mode=mode, seconds=took, statuses={m: f["status"].value_counts().to_dict() for m, f in frame.groupby("mode", observed=True)},
            ratio=frame[frame["mode"] == mode]["ratio"].describe().to_dict(), bad=frame[frame["status"] != "ok"][["op", "mode", "status", "error"]].head(8).values.tolist())


def sequence(name):
    results, took = rows_of(name, f"sequence:{name}", sequence=True, timeout=30)
    said = results.header["sequence"]
    say(f"sequence:{name}", seconds=took, **{k: v for k, v in said.items() if isinstance(v, (int, float, str, list)) and len(str(v)) < 300})


def ncu(name):
    results, took = rows_of(name, f"ncu:{name}", ncu=True, top=2 if TINY else 10, budget=0.05, timeout=30, output=WORK / f"ncu-{name}-rows.json", force=True)
    columns = [c for c in results.frame.columns if c.startswith("ncu_")]
    say(f"ncu:{name}", seconds=took, rows=results.frame[["op", "median_us", *columns]].values.tolist())


def roofline():
    from opgrip.traces.analysis.machine_ceilings import to_json
    from opgrip.replay.analyses.roofline.measuring import measure
    began = time.perf_counter()
    ceilings = measure("cuda:0" if KIND == "cuda" else DEVICE)
    say("roofline", seconds=time.perf_counter() - began, ceilings=to_json(ceilings))


def zoo():
    from opgrip.replay import replay
    from opgrip.zoo.scoring.distilled import distilled_scores
    began = time.perf_counter()
    results = replay("trace:zoo_500", device=DEVICE, budget=0.1, timeout=20, output=WORK / "zoo.json", force=True, **({"top": 5} if TINY else {}))
    frame, took = results.frame, time.perf_counter() - began
    bad = frame[frame["status"] != "ok"].groupby(["op", "status"], observed=True).size()
    say("zoo", seconds=took, rows=len(frame), per_s=len(frame) / took, statuses=frame["status"].value_counts().to_dict(), bad={str(k): int(v) for k, v in bad.items()},
        bad_errors=frame[frame["status"] != "ok"][["op", "error"]].drop_duplicates("op").head(30).values.tolist())
    for score in distilled_scores(results):
        say("zoo", score=score.score, speed=score.speed, supported=score.supported, partial=score.is_partial)


def failures():
    """Steps of gpu_check that only a real device answers, in their own processes."""
    os.environ.setdefault("PYTHONPATH", "")
    root = next(p for p in HERE.parents if (p / "benchmarks" / "gpu_check.py").exists()) if any((p / "benchmarks" / "gpu_check.py").exists() for p in HERE.parents) else Path.cwd()
    for pattern in ("*assert costs*", "*out of memory*", "*exec-mode graph cannot*", "*program with a graph*", "*side stream*", "TF32*", "*NCCL*"):
        done = subprocess.run([sys.executable, str(root / "benchmarks/gpu_check.py"), "--device", DEVICE, "--only", pattern, "-o", str(WORK / f"check-{re.sub(r'[^a-zA-Z]+', '-', pattern)}.zip")],
                              capture_output=True, text=True, cwd=tempfile.gettempdir())
        say("failures", said=[l for l in done.stdout.splitlines() if re.match(r"\s*\d+ ", l)], stderr=done.stderr[-200:])


STAGES = {"facts": facts, "clocks": clocks, "program": programs, "replay": replays, "sequence": sequence, "graph": graph, "modes": modes, "ncu": ncu,
          "roofline": roofline, "zoo": zoo, "failures": failures}

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("drive", "stage")); parser.add_argument("name")
    parser.add_argument("--out", default=os.environ.get("OUT", "out")); parser.add_argument("--work", default=str(Path(tempfile.gettempdir()) / "contact-work"))
    parser.add_argument("--seconds", type=float, default=285); parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true"); parser.add_argument("--only", type=lambda t: t.split(","), default=[])
    arguments = parser.parse_args(); arguments.plan = arguments.name
    sys.exit(drive(arguments) if arguments.what == "drive" else stage(arguments))
