#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Prefill attention on one H200: FlashAttention-3, cuDNN and libkascade_cuda in one process at the same shapes.

Before each call a large buffer is read, which flushes the L2 cache; figures are medians of CUDA-event times.
compare_prefill.py --library build/cuda/lib/libkascade_cuda.so --output prefill.json
"""
import argparse
import re

import torch
import torch.nn.functional as F
from harness import ANCHOR, DENSE, LAYER0, ROLES, Kascade, Problem, Result, mean_of, measure, take_best_peer
from torch.nn.attention import SDPBackend, sdpa_kernel

TILE = 32


def peers(problem, count):
    """Times of the dense peers, by name; an error text where one does not run."""
    times = {}
    q, k, v = problem.q, problem.k, problem.v
    try:
        import fa3_fwd_interface as fa3
        times["fa3"] = measure(lambda: fa3.flash_attn_func(q, k, v, causal=True), count, 1)
    except Exception as error:
        times["fa3 error"] = str(error)[:200]
    if problem.rows == problem.length:
        try:
            qt, kt, vt = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)

            def cudnn():
                with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                    return F.scaled_dot_product_attention(qt, kt, vt, is_causal=True, enable_gqa=True)

            times["cudnn"] = measure(cudnn, count, 1)
        except Exception as error:
            times["cudnn error"] = str(error)[:200]
    return times


def profile(problem):
    """Milliseconds of every kernel of one call, by role."""
    from torch.profiler import ProfilerActivity
    calls = problem.calls()
    try:
        import fa3_fwd_interface as fa3
        calls["fa3"] = lambda: fa3.flash_attn_func(problem.q, problem.k, problem.v, causal=True)
    except ImportError:
        pass
    for name, call in calls.items():
        call()
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[ProfilerActivity.CUDA]) as trace:
            call()
            torch.cuda.synchronize()
        kernels = {}
        for event in trace.events():
            key = re.sub(r".*?(\w+)_kernel.*", r"\1", event.name)[:40]
            kernels[key] = kernels.get(key, 0) + event.device_time / 1000
        print("profile", problem.length, name, {k: round(t, 3) for k, t in kernels.items() if t > 0.002}, flush=True)


def bench(problem, with_peers=True, count=None):
    flops = 4 * problem.batch * problem.query_heads * problem.head_dim * (
        problem.rows * problem.length - problem.rows * (problem.rows - 1) / 2)
    count = count or max(2, min(8, int(4e14 / flops)))
    row = {**problem.row(), "tile": problem.tile}
    if not problem.params.page_size:
        row["dense_error"] = problem.dense_error()
    calls = {**problem.calls(), "layer0_all": problem.call(LAYER0)}
    row["workspace_mib"] = max(call.workspace_bytes for call in calls.values()) / 2**20
    ms = row["ms"] = {name: measure(call, count, 1) for name, call in calls.items()}
    row["mean_ms"] = mean_of(ms)
    row["share_of_dense"] = {n: t / ms["dense"] for n, t in ms.items() if n != "dense"}
    row["dense_tflops"] = flops / ms["dense"] / 1e9
    row["own_dense_over_mean"] = ms["dense"] / row["mean_ms"]
    if with_peers:
        row["peers_ms"] = peers(problem, count)
        take_best_peer(row)
    print(f"B {row['batch']} L {row['context']} rows {row['rows']} H {row['query_heads']}/{row['kv_heads']} d "
          f"{row['head_dim']} page {row['page_size']} {row['dtype']}: " + " ".join(f"{n} {t:.3f}" for n, t in ms.items())
          + f" | peers {row.get('peers_ms')} mean {row['mean_ms']:.3f} speedup {row.get('speedup', 0):.2f} | share "
          + " ".join(f"{n} {t:.3f}" for n, t in row["share_of_dense"].items())
          + f" | dense {row['dense_tflops']:.0f} TFLOP/s err {row['dense_error']} ws {row['workspace_mib']:.0f} MiB",
          flush=True)
    return row


def chunked(problem, every=1):
    """Roles' times over a prompt in chunks of problem.rows, each chunk after the keys of those before it; every: of each so
    many chunks only the middle one is run and counts for all. The last chunk is run in any case."""
    def chunk(end):
        problem.lens.fill_(end)
        problem.cu_kv[1] = end
        problem.params.max_kv_len = end
        calls = problem.calls()
        return ({name: measure(call, 1, 1) for name, call in calls.items()},
                max(call.workspace_bytes for call in calls.values()))

    times = dict.fromkeys(ROLES, 0)
    for end in range(problem.rows * ((every + 1) // 2), problem.length + 1, problem.rows * every):
        for name, ms in chunk(end)[0].items():
            times[name] += every * ms
    last, workspace = chunk(problem.length)
    row = {"context": problem.length, "chunk": problem.rows, "every": every, "ms": times, "last_chunk_ms": last,
           "workspace_mib": workspace / 2**20, "mean_ms": mean_of(times)}
    print("chunked", row, flush=True)
    return row


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--library", required=True)
    parser.add_argument("--output", default="prefill.json")
    parser.add_argument("--set", default="quick", choices=["quick", "full"])
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--lengths", nargs="*", type=int, default=[131072, 65536, 32768, 8192])
    parser.add_argument("--profile", nargs="*", type=int, default=[], metavar="CONTEXT", help="also times of kernels")
    parser.add_argument("--trace", type=int, metavar="CONTEXT", help="only one anchor and one dense call, for a profiler")
    parser.add_argument("--commit", default="unknown")
    args = parser.parse_args()
    kascade = Kascade(args.library)

    def prompt(batch, length, rows=None, **options):
        return Problem(kascade, batch, length, rows or length, TILE, **options)

    if args.trace:
        problem = prompt(1, args.trace)
        for role in (ANCHOR, DENSE):
            problem.call(role)()
        return torch.cuda.synchronize()
    result = Result(args.output, args.commit, budget="default, 10 %, rolling")

    def run(*shape, with_peers=True, **options):
        problem = prompt(*shape, **options)
        result.fields["rows"].append(bench(problem, with_peers and not args.no_peers))
        if shape[1] in args.profile and not options:
            profile(problem)
        del problem
        result.save()

    def run_chunked(problem, **options):
        result.fields.setdefault("chunked", []).append(chunked(problem, **options))
        del problem
        result.save()

    for length in args.lengths:
        run(1, length)
    if args.set == "full":
        run(16, 8192)
        run(1, 131072, rows=256)
        run(1, 65536, page_size=16, with_peers=False)
        run(1, 65536, page_size=64, with_peers=False)
        run_chunked(prompt(1, 131072, rows=8192))
        run(1, 32768, dtype=torch.float16, with_peers=False)
        run(1, 32768, query_heads=9, kv_heads=3, head_dim=64, with_peers=False)
        run(1, 32768, query_heads=16, kv_heads=4, head_dim=256, with_peers=False)
        run_chunked(prompt(1, 1 << 20, rows=8192), every=32)
        run(1, 262144)


if __name__ == "__main__":
    main()
