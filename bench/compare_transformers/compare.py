#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Transformers with torch SDPA beside `kascade bench e2e`, on one GPU, at the same shapes, one after the other.

    python3 bench/compare_transformers/compare.py --program build/cuda/bin/kascade --output bench/results/h200/e2e.json

The model is Llama-3.1-8B's shape with random bf16 weights, built on the GPU. Transformers gets what a careful user would
give it: inference mode, no attention mask, logits of the last token alone, the fastest SDPA backend for each shape, and
for decode the fastest of three caches: DynamicCache as it comes; a preallocated one that returns views, so that nothing
is copied or masked; and that with the whole step in a CUDA graph. The graph repeats a step at one length, which no real
run does: it is the least that Transformers could take. Of its prompts the fastest run counts; of ours the median.
"""

import argparse
import datetime
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
WORK = "decode:4x128K,decode:1x128K,decode:32x16K,prefill:128K,prefill:32K"
VOCABULARY = 128256


def parse_work(text):
    kind, size = text.split(":")
    batch, tokens = size.split("x") if "x" in size else ("1", size)
    factor = 1024 if tokens.endswith("K") else 1
    return kind, int(batch), int(tokens.rstrip("K")) * factor


def note(text):
    print(text, file=sys.stderr, flush=True)


def transformers_worker(arguments):
    """Every piece of work in this process; writes a JSON document."""
    import warnings

    import torch
    import transformers
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM
    from transformers.cache_utils import DynamicLayer
    from transformers.models.llama import modeling_llama

    warnings.filterwarnings("ignore", category=UserWarning)  # which kernels SDPA passes over
    backends = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION,
                "efficient": SDPBackend.EFFICIENT_ATTENTION}
    work = [parse_work(text) for text in arguments.work.split(",")]
    longest = max(tokens for _, _, tokens in work)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=4096, intermediate_size=14336, num_hidden_layers=arguments.layers,
        num_attention_heads=32, num_key_value_heads=8, head_dim=128, max_position_embeddings=max(longest, 131072),
        rms_norm_eps=1e-5, tie_word_embeddings=False, attn_implementation="sdpa",
        rope_parameters={"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
                         "high_freq_factor": 4.0, "original_max_position_embeddings": 8192})
    torch.manual_seed(1)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = LlamaForCausalLM(config).eval()
    torch.cuda.synchronize()
    note(f"transformers: model of {sum(p.numel() for p in model.parameters()) / 1e9:.2f}e9 parameters")

    class Preallocated(DynamicLayer):
        """Keys and values of one layer in place; attention sees views of them."""

        def __init__(self, batch, capacity, length):
            super().__init__()
            self.buffers = [torch.randn(batch, 8, capacity, 128, device="cuda") for _ in range(2)]
            self.is_initialized = True
            self.length = length

        def update(self, key_states, value_states, *_, **__):
            end = self.length + key_states.shape[-2]
            for buffer, states in zip(self.buffers, (key_states, value_states)):
                buffer[:, :, self.length:end] = states
            self.length = end
            return self.buffers[0][:, :, :end], self.buffers[1][:, :, :end]

        def get_seq_length(self):
            return self.length

    def timed(run):
        torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        torch.cuda.synchronize()
        return time.perf_counter() - start

    def fastest_backend(run, names):
        times = {}
        for name in names:
            try:
                with sdpa_kernel(backends[name]):
                    run()
                    times[name] = timed(run)
            except RuntimeError as error:
                note(f"transformers: {name}: {str(error).splitlines()[0]}")
            torch.cuda.empty_cache()
        note(f"transformers: backends {times}")
        return min(times, key=times.get), times

    prefill_choice = []

    def prefill(tokens):
        ids = torch.randint(0, VOCABULARY, (1, tokens), device="cuda")

        def first_token(ids=ids):
            cache = DynamicCache(config=config)
            logits = model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
            return int(logits[0, -1].argmax())

        # The choice is made once, on at most 32K tokens: it does not turn at longer prompts, and they are dear.
        if not prefill_choice:
            sample = ids[:, :32768]
            prefill_choice.extend(fastest_backend(lambda: first_token(sample), ("cudnn", "flash")))
        backend, times = prefill_choice
        # Long prompts run once; memory of their size is in the allocator's hands before.
        torch.empty(min(tokens * 480 * 1024, torch.cuda.mem_get_info()[0] // 2), dtype=torch.uint8, device="cuda")
        torch.cuda.reset_peak_memory_stats()
        with sdpa_kernel(backends[backend]):
            seconds = [timed(first_token) for _ in range(arguments.repetitions if tokens <= 65536 else 1)]
        return {"first_token_seconds": min(seconds), "runs": seconds, "backend": backend,
                "backend_seconds": times, "peak_memory_bytes": torch.cuda.max_memory_allocated()}

    def decode(batch, tokens):
        base = tokens - arguments.steps - 8
        layers = [Preallocated(batch, tokens, base) for _ in range(arguments.layers)]
        cache = DynamicCache(config=config)
        cache.layers[:] = layers
        cache.layer_class_to_replicate = None
        ids = torch.randint(0, VOCABULARY, (batch, 1), device="cuda")

        def step():
            logits = model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
            ids.copy_(logits[:, -1].argmax(-1, keepdim=True))

        def rewind(length=base):
            for layer in layers:
                layer.length = length

        def steps(count):
            for _ in range(count):
                step()
                ids[0, 0].item()  # a caller reads each token

        def seconds_a_step(run, count):
            steps_seconds = []
            for _ in range(arguments.repetitions):
                rewind()
                run(3)
                steps_seconds.append(timed(lambda: run(count)) / count)
            return statistics.median(steps_seconds)

        def backend_run():
            rewind()
            steps(3)

        backend, times = fastest_backend(backend_run, backends)
        variants, errors = {}, {}
        torch.cuda.reset_peak_memory_stats()
        with sdpa_kernel(backends[backend]):
            variants["preallocated"] = seconds_a_step(steps, arguments.steps)
            try:
                graph = torch.cuda.CUDAGraph()
                rewind(tokens - 1)
                step()
                rewind(tokens - 1)
                torch.cuda.synchronize()
                # While a stream is captured Transformers builds a mask of what needs none, which costs it the fast kernels.
                create_causal_mask = modeling_llama.create_causal_mask
                modeling_llama.create_causal_mask = lambda *_, **__: None
                try:
                    with torch.cuda.graph(graph):
                        step()
                finally:
                    modeling_llama.create_causal_mask = create_causal_mask

                def replays(count):
                    for _ in range(count):
                        graph.replay()
                        ids[0, 0].item()

                variants["preallocated, CUDA graph"] = seconds_a_step(replays, arguments.steps)
                del graph
            except RuntimeError as error:
                errors["preallocated, CUDA graph"] = str(error).splitlines()[0]
            peak = torch.cuda.max_memory_allocated()
            # DynamicCache last: it lets go of the buffers one by one.
            try:
                cache.layers.clear()
                for index, layer in enumerate(layers):
                    dynamic = DynamicLayer()
                    dynamic.keys, dynamic.values = (buffer[:, :, :base] for buffer in layer.buffers)
                    dynamic.dtype, dynamic.device, dynamic.is_initialized = torch.bfloat16, dynamic.keys.device, True
                    cache.layers.append(dynamic)
                    layers[index] = None
                layers.clear()
                torch.cuda.empty_cache()
                steps(2)
                variants["DynamicCache"] = timed(lambda: steps(4)) / 4
            except (RuntimeError, torch.cuda.OutOfMemoryError) as error:
                errors["DynamicCache"] = str(error).splitlines()[0]
        best = min(variants, key=variants.get)
        return {"step_seconds": variants[best], "tokens_per_s": batch / variants[best], "cache": best,
                "step_seconds_by_cache": variants, "errors": errors, "backend": backend, "backend_3_steps_seconds": times,
                "peak_memory_bytes": peak}

    results = {}
    with torch.inference_mode():
        for text, (kind, batch, tokens) in zip(arguments.work.split(","), work):
            try:
                results[text] = prefill(tokens) if kind == "prefill" else decode(batch, tokens)
            except (RuntimeError, ValueError, TypeError, AttributeError) as error:
                results[text] = {"error": str(error).splitlines()[0] if str(error) else type(error).__name__}
            note(f"transformers: {text}: {results[text]}")
            torch.cuda.empty_cache()
    document = {"torch": torch.__version__, "transformers": transformers.__version__,
                "cudnn": torch.backends.cudnn.version(), "work": results}
    with open(arguments.worker_output, "w") as file:
        json.dump(document, file)


def gpu_state():
    """Name, driver, clocks and power limit as nvidia-smi tells them; empty where there is none."""
    fields = "name,driver_version,clocks.sm,clocks.mem,clocks.max.sm,clocks.max.mem,power.limit,temperature.gpu"
    try:
        values = subprocess.run(["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"], check=True,
                                capture_output=True, text=True).stdout.splitlines()[0].split(", ")
        return dict(zip(fields.split(","), values))
    except (OSError, subprocess.CalledProcessError, IndexError):
        return {}


def comparison(peer, ours):
    """One row for each piece of work: seconds, and how often they hold those of kascade."""
    rows = []
    for item in ours["work"]:
        runs = {run["policy"]: run.get("step_seconds", run.get("first_token_seconds")) for run in item["runs"]}
        theirs = peer.get("work", {}).get(item["name"], {})
        theirs = theirs.get("step_seconds", theirs.get("first_token_seconds"))
        row = {"work": item["name"], "transformers_seconds": theirs}
        for policy, seconds in runs.items():
            row[f"{policy}_seconds"] = seconds
            if theirs:
                row[f"transformers_over_{policy}"] = theirs / seconds
        rows.append(row)
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", default=os.path.join(ROOT, "build/cuda/bin/kascade"))
    parser.add_argument("--output", required=True, help="the JSON document")
    parser.add_argument("--figure", help="an SVG of where kascade's time goes")
    parser.add_argument("--work", default=WORK)
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--layers", type=int, default=32, help="of the peer's model; fewer only to try this script")
    parser.add_argument("--commit", help="of the build (default: of this folder)")
    parser.add_argument("--without-peer", action="store_true")
    parser.add_argument("--worker-output", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker_output:
        return transformers_worker(arguments)

    commit = arguments.commit or subprocess.run(["git", "-C", ROOT, "rev-parse", "--short", "HEAD"], capture_output=True,
                                                text=True).stdout.strip()
    document = {"date": datetime.date.today().isoformat(), "commit": commit, "device_before": gpu_state()}

    def save():
        with open(arguments.output, "w") as file:
            json.dump(document, file, indent=1)
            file.write("\n")

    command = [arguments.program, "bench", "e2e", "--shape", "llama-3.1-8b", "--device", "cuda", "--work", arguments.work,
               "--steps", str(arguments.steps), "--repetitions", str(arguments.repetitions), "--commit", commit, "--json"]
    if arguments.figure:
        command += ["--figure", arguments.figure]
    start = time.perf_counter()
    document["kascade"] = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    note(f"kascade: {time.perf_counter() - start:.0f} s")
    document["device_after_kascade"] = gpu_state()
    save()
    if not arguments.without_peer:
        # A process of its own: its memory is free again when it ends.
        with tempfile.NamedTemporaryFile(suffix=".json") as output:
            start = time.perf_counter()
            subprocess.run([sys.executable, os.path.abspath(__file__), *sys.argv[1:], "--worker-output", output.name],
                           check=True, env={**os.environ, "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"})
            document["transformers"] = json.load(open(output.name))
            note(f"transformers: {time.perf_counter() - start:.0f} s")
        document["device_after_transformers"] = gpu_state()
    document["comparison"] = comparison(document.get("transformers", {}), document["kascade"])
    save()
    for row in document["comparison"]:
        print(json.dumps(row))


if __name__ == "__main__":
    main()
