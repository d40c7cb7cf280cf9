#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Decode attention on one H200: FlashAttention-3, cuDNN and libkascade_cuda in one process at the same shapes.

Every contender is captured in a CUDA graph and replayed; before each replay a large buffer is read, which flushes the L2
cache; figures are medians of CUDA-event times. compare.py --library build/cuda/lib/libkascade_cuda.so --output decode.json
"""
import argparse
import time

import torch
import torch.nn.functional as F
from harness import DENSE, REUSE, ROLES, Kascade, Problem, Result, mean_of, measure, take_best_peer
from torch.nn.attention import SDPBackend, sdpa_kernel


def graph_of(call):
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()

    def replay(kept=call):  # the call owns the workspace
        graph.replay()

    return replay


def settle(problem, seconds=0.25):
    """Dense calls until the device has settled: the first tenth of a second on new inputs is up to a tenth slower."""
    replay = graph_of(problem.call(DENSE))
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        replay()
        torch.cuda.synchronize()


def read_bandwidth():
    x = torch.ones(4 << 30, dtype=torch.float32, device="cuda")
    ms = min(measure(lambda: x.sum(), 5), measure(lambda: torch.max(x), 5))
    return x.numel() * 4 / ms / 1e6


def peers(problem):
    """Times of the dense peers, by name; an error text where one does not run."""
    times = {}
    q, k, v, lens = problem.q, problem.k, problem.v, problem.lens
    try:
        import fa3_fwd_interface as fa3
        for splits in (0, 1, 2, 4, 8, 16, 32, 64, 128):
            for pack in (None, True, False):
                try:
                    metadata = fa3.get_scheduler_metadata(
                        problem.batch, problem.rows, problem.length, problem.query_heads, problem.kv_heads,
                        problem.head_dim, lens, q.dtype, causal=True, num_splits=splits, pack_gqa=pack)
                except Exception:
                    metadata = None
                try:
                    times[f"fa3 splits={splits} pack_gqa={pack}"] = measure(graph_of(
                        lambda: fa3.flash_attn_with_kvcache(q, k, v, cache_seqlens=lens, causal=True, num_splits=splits,
                                                            pack_gqa=pack, scheduler_metadata=metadata)))
                except Exception as error:
                    times.setdefault("fa3 error", str(error)[:200])
    except ImportError as error:
        times["fa3 error"] = str(error)
    try:
        qt, kt, vt = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)

        def cudnn():
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                return F.scaled_dot_product_attention(qt, kt, vt, enable_gqa=True)

        times["cudnn"] = measure(graph_of(cudnn))
    except Exception as error:
        times["cudnn error"] = str(error)[:200]
    return times


def bench(problem, with_peers, bandwidth):
    row = problem.row()
    if not problem.params.page_size and problem.length == problem.params.max_kv_len:
        row["dense_error"] = problem.dense_error()
    settle(problem)
    ms = row["ms"] = {name: measure(graph_of(call)) for name, call in problem.calls().items()}
    if with_peers:
        problem.random_sets()
        ms["reuse_random_sets"] = measure(graph_of(problem.call(REUSE)))
    row["mean_ms"] = mean_of(ms)
    row["share_of_dense"] = {n: ms[n] / ms["dense"] for n in ROLES[1:]}
    row["own_dense_over_mean"] = ms["dense"] / row["mean_ms"]
    dense_bytes = 2 * problem.k.numel() * problem.k.element_size()
    row["dense_gb_per_s"] = dense_bytes / ms["dense"] / 1e6
    row["dense_share_of_bandwidth"] = row["dense_gb_per_s"] / bandwidth
    if with_peers:
        row["peers_ms"] = peers(problem)
        take_best_peer(row)
    print(f"B {row['batch']} L {row['context']} H {row['query_heads']}/{row['kv_heads']} d {row['head_dim']} rows "
          f"{row['rows']} page {row['page_size']} {row['dtype']}: "
          + " ".join(f"{n} {t:.4f}" for n, t in ms.items())
          + f" | peer {row.get('best_peer_ms', 0):.4f} ({row.get('best_peer')}) mean {row['mean_ms']:.4f} speedup "
          f"{row.get('speedup', 0):.2f}, of own dense {row['own_dense_over_mean']:.2f} | share "
          + " ".join(f"{n} {t:.3f}" for n, t in row["share_of_dense"].items())
          + f" | {row['dense_gb_per_s']:.0f} GB/s err {row['dense_error']}", flush=True)
    return row


def trace(kascade, batch, length):
    """One call of every role, for a profiler around this process."""
    problem = Problem(kascade, batch, length)
    for role in range(len(ROLES)):
        problem.call(role)()
        torch.cuda.synchronize()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--library", required=True)
    parser.add_argument("--output", default="decode.json")
    parser.add_argument("--set", default="quick", choices=["quick", "full"])
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--trace", nargs=2, type=int, metavar=("BATCH", "CONTEXT"), help="only call every role once")
    parser.add_argument("--commit", default="unknown")
    args = parser.parse_args()
    kascade = Kascade(args.library)
    if args.trace:
        return trace(kascade, *args.trace)
    bandwidth = read_bandwidth()
    result = Result(args.output, args.commit, read_gb_per_s=bandwidth, budget="default, 10 %")

    def run(*shape, with_peers=True, **options):
        problem = Problem(kascade, *shape, **options)
        result.fields["rows"].append(bench(problem, with_peers and not args.no_peers, bandwidth))
        del problem
        result.save()

    for shape in ((64, 131072), (64, 32768), (8, 131072), (4, 131072), (1, 131072), (1, 32768)):
        run(*shape)
    if args.set == "full":
        for page_size in (1, 16, 64):
            run(16, 131072, with_peers=False, page_size=page_size)
        run(16, 131072, with_peers=False)
        run(16, 131072, with_peers=False, rows=4)
        run(16, 131072, with_peers=False, dtype=torch.float16)
        # As many bytes of keys as 4 (3) sequences of 32/8 heads have, and as many as 16 (12).
        for batch in 16, 64:
            run(batch, 131072, with_peers=False, query_heads=12, kv_heads=2)
            run(batch, 131072, with_peers=False, query_heads=9, kv_heads=3, head_dim=64)
        run(64, 2048, with_peers=False)
        run(64, 2048, with_peers=False, max_length=131072)
        run(16, 262144, with_peers=False)
        run(16, 524288, with_peers=False)


if __name__ == "__main__":
    main()
