#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Prefill attention on one H200: FlashAttention-3, cuDNN and libkascade_cuda in one process at the same shapes.

Before each call a large buffer is read, which flushes the L2 cache; figures are medians of CUDA-event times.
compare_prefill.py --library build/cuda/lib/libkascade_cuda.so --output prefill.json
"""
import argparse
import ctypes
import datetime
import json
import re
import subprocess

import torch
import torch.nn.functional as F
from compare import ANCHOR, DENSE, DTYPES, LAYER0, REUSE, ROLES, Kascade, Params, default_budget, measure, ptr
from torch.nn.attention import SDPBackend, sdpa_kernel


class Prefill:
    """New rows [batch, rows] over keys [batch, length] (in pages of random order when page_size is given)."""

    def __init__(self, kascade, batch, length, rows=None, query_heads=32, kv_heads=8, head_dim=128, dtype=torch.bfloat16,
                 tile=32, percent=10, page_size=0):
        rows = rows or length
        self.kascade, self.batch, self.length, self.rows, self.tile = kascade, batch, length, rows, tile
        self.query_heads, self.kv_heads, self.head_dim = query_heads, kv_heads, head_dim

        def random(*shape):
            return torch.randn(*shape, device="cuda", dtype=dtype)

        self.k, self.v = random(batch, length, kv_heads, head_dim), random(batch, length, kv_heads, head_dim)
        self.q = random(batch, rows, query_heads, head_dim)
        self.out = torch.empty_like(self.q)
        self.lse = torch.empty(batch * rows, query_heads, device="cuda")
        tiles = (length - 1) // tile - (length - rows) // tile + 1
        self.capacity = max(128, -(-int(percent * 100) * length // 10000)) + 128
        self.positions = torch.empty(batch * tiles, kv_heads, self.capacity, dtype=torch.int32, device="cuda")
        self.counts = torch.zeros(batch * tiles, kv_heads, dtype=torch.int32, device="cuda")
        ones = torch.arange(batch + 1, dtype=torch.int32, device="cuda")
        self.cu_q, self.tiles, self.cu_kv = ones * rows, ones * tiles, ones * length
        self.lens = torch.full((batch,), length, dtype=torch.int32, device="cuda")
        self.needed = torch.zeros(kv_heads, dtype=torch.uint8, device="cuda")
        self.needed[0] = 1
        p = Params(set_owner=0, batch=batch, query_heads=query_heads, kv_heads=kv_heads, head_dim=head_dim,
                   q_dtype=DTYPES[dtype], out_dtype=DTYPES[dtype], kv_dtype=DTYPES[dtype], capacity=self.capacity,
                   max_q_len=rows, max_kv_len=length, max_total_q=batch * rows, max_tiles=batch * tiles,
                   k_scale=1, v_scale=1, budget=default_budget(percent))
        p.q, p.out, p.lse = self.q.data_ptr(), self.out.data_ptr(), self.lse.data_ptr()
        p.q_row_stride = p.out_row_stride = query_heads * head_dim
        p.q_head_stride = p.out_head_stride = head_dim
        p.lse_row_stride = query_heads
        p.cu_seqlens_q, p.seq_lens_kv = self.cu_q.data_ptr(), self.lens.data_ptr()
        p.k, p.v = self.k.data_ptr(), self.v.data_ptr()
        p.k_token_stride = p.v_token_stride = kv_heads * head_dim
        p.k_head_stride = p.v_head_stride = head_dim
        p.positions, p.counts, p.tile_offsets = (
            self.positions.data_ptr(), self.counts.data_ptr(), self.tiles.data_ptr())
        if page_size:
            pages = batch * length // page_size
            self.table = torch.randperm(pages, device="cuda").to(torch.int32).view(batch, -1).contiguous()
            p.page_table, p.page_table_stride = self.table.data_ptr(), length // page_size
            p.page_size = page_size
            p.k_page_stride = p.v_page_stride = page_size * kv_heads * head_dim
        else:
            p.cu_seqlens_kv = self.cu_kv.data_ptr()
        self.params = p

    def call(self, role, needed=None):
        p = Params.from_buffer_copy(self.params)
        p.role = role
        if needed is not None:
            p.needed = needed.data_ptr()
        size = ctypes.c_size_t()
        self.kascade.check(self.kascade.lib.kascade_cuda_prefill_workspace(ctypes.byref(p), self.tile, ctypes.byref(size)))
        workspace = torch.empty(size.value + 256, dtype=torch.uint8, device="cuda")
        base = (workspace.data_ptr() + 255) // 256 * 256

        def run(kept=workspace):
            self.kascade.check(self.kascade.lib.kascade_cuda_prefill(
                ctypes.byref(p), self.tile, ptr(base), ctypes.c_size_t(kept.data_ptr() + kept.numel() - base),
                ptr(torch.cuda.current_stream().cuda_stream)))

        run.workspace_bytes = size.value
        return run


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


def check_dense(problem):
    """Largest difference of our dense output from fp32 attention, over the last rows of one KV head."""
    problem.call(DENSE)()
    torch.cuda.synchronize()
    group = problem.query_heads // problem.kv_heads
    rows = min(64, problem.rows)
    q = problem.q[-1, -rows:, -group:].float().transpose(0, 1)
    k, v = problem.k[-1, :, -1].float(), problem.v[-1, :, -1].float()
    scores = q @ k.T / problem.head_dim ** 0.5
    keys = torch.arange(problem.length, device="cuda")
    scores.masked_fill_(keys[None, None, :] > (keys[-rows:])[None, :, None], float("-inf"))
    exact = (torch.softmax(scores, -1) @ v).transpose(0, 1)
    return float((problem.out[-1, -rows:, -group:].float() - exact).abs().max())


def profile(problem):
    """Milliseconds of every kernel of one call, by role."""
    from torch.profiler import ProfilerActivity
    calls = {name: problem.call(role) for role, name in enumerate(ROLES)}
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
    row = {"batch": problem.batch, "context": problem.length, "rows": problem.rows, "query_heads": problem.query_heads,
           "kv_heads": problem.kv_heads, "head_dim": problem.head_dim, "tile": problem.tile,
           "page_size": problem.params.page_size, "dtype": str(problem.q.dtype)[6:], "dense_error": None}
    if not problem.params.page_size:
        row["dense_error"] = check_dense(problem)
    calls = {"dense": problem.call(DENSE), "layer0": problem.call(LAYER0, problem.needed), "layer0_all": problem.call(LAYER0),
             "anchor": problem.call(ANCHOR), "reuse": problem.call(REUSE)}
    row["workspace_mib"] = max(call.workspace_bytes for call in calls.values()) / 2**20
    ms = row["ms"] = {name: measure(call, count, 1) for name, call in calls.items()}
    row["mean_ms"] = (ms["layer0"] + 4 * ms["anchor"] + 27 * ms["reuse"]) / 32
    row["share_of_dense"] = {n: t / ms["dense"] for n, t in ms.items() if n != "dense"}
    row["dense_tflops"] = flops / ms["dense"] / 1e9
    row["own_dense_over_mean"] = ms["dense"] / row["mean_ms"]
    if with_peers:
        row["peers_ms"] = peers(problem, count)
        figures = {n: t for n, t in row["peers_ms"].items() if not isinstance(t, str)}
        if figures:
            row["best_peer"] = min(figures, key=figures.get)
            row["best_peer_ms"] = figures[row["best_peer"]]
            row["dense_of_best_peer"] = ms["dense"] / row["best_peer_ms"]
            row["speedup"] = row["best_peer_ms"] / row["mean_ms"]
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
        calls = {name: problem.call(role, problem.needed if role == LAYER0 else None)
                 for name, role in (("dense", DENSE), ("layer0", LAYER0), ("anchor", ANCHOR), ("reuse", REUSE))}
        return ({name: measure(call, 1, 1) for name, call in calls.items()},
                max(call.workspace_bytes for call in calls.values()))

    times = dict.fromkeys(["dense", "layer0", "anchor", "reuse"], 0)
    for end in range(problem.rows * ((every + 1) // 2), problem.length + 1, problem.rows * every):
        for name, ms in chunk(end)[0].items():
            times[name] += every * ms
    last, workspace = chunk(problem.length)
    row = {"context": problem.length, "chunk": problem.rows, "every": every, "ms": times, "last_chunk_ms": last,
           "workspace_mib": workspace / 2**20,
           "mean_ms": (times["layer0"] + 4 * times["anchor"] + 27 * times["reuse"]) / 32}
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
    if args.trace:
        problem = Prefill(kascade, 1, args.trace)
        for role in (ANCHOR, DENSE):
            problem.call(role)()
        return torch.cuda.synchronize()
    smi = subprocess.run(["nvidia-smi", "--query-gpu=name,driver_version,clocks.sm,clocks.mem", "--format=csv,noheader"],
                         capture_output=True, text=True).stdout.strip()
    result = {"date": datetime.date.today().isoformat(), "commit": args.commit, "device": smi,
              "torch": torch.__version__, "budget": "default, 10 %, rolling", "rows": []}
    print("device", smi, flush=True)

    def save():
        torch.cuda.empty_cache()
        with open(args.output, "w") as file:
            json.dump(result, file, indent=1)

    def run(*shape, with_peers=True, **options):
        problem = Prefill(kascade, *shape, **options)
        result["rows"].append(bench(problem, with_peers and not args.no_peers))
        if shape[1] in args.profile and not options:
            profile(problem)
        del problem
        save()

    for length in args.lengths:
        run(1, length)
    if args.set == "full":
        run(16, 8192)
        run(1, 131072, rows=256)
        run(1, 65536, page_size=16, with_peers=False)
        run(1, 65536, page_size=64, with_peers=False)
        result["chunked"] = [chunked(Prefill(kascade, 1, 131072, rows=8192))]
        save()
        run(1, 32768, dtype=torch.float16, with_peers=False)
        run(1, 32768, query_heads=9, kv_heads=3, head_dim=64, with_peers=False)
        run(1, 32768, query_heads=16, kv_heads=4, head_dim=256, with_peers=False)
        result["chunked"].append(chunked(Prefill(kascade, 1, 1 << 20, rows=8192), every=32))
        save()
        run(1, 262144)
    result["clocks_after"] = subprocess.run(["nvidia-smi", "--query-gpu=clocks.sm,clocks.mem", "--format=csv,noheader"],
                                            capture_output=True, text=True).stdout.strip()
    save()


if __name__ == "__main__":
    main()
