#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Decode attention on one H200: FlashAttention-3, cuDNN and libkascade_cuda in one process at the same shapes.

Every contender is captured in a CUDA graph and replayed; before each replay a large buffer is read, which flushes the L2
cache; figures are medians of CUDA-event times. compare.py --library build/cuda/lib/libkascade_cuda.so --output decode.json
"""
import argparse
import ctypes
import datetime
import json
import statistics
import subprocess
import time

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

i32, i64, f32, ptr = ctypes.c_int32, ctypes.c_int64, ctypes.c_float, ctypes.c_void_p


class Budget(ctypes.Structure):
    _fields_ = [(n, i32) for n in (
        "percent_hundredths", "round_up", "floor", "round_to", "sinks", "recent", "forced_charged", "own_tile", "tile",
        "rolling", "rolling_min_rows", "rolling_capped")]


class Params(ctypes.Structure):
    """kascade_decode_params of src/attention/cuda/c_api.h."""
    _fields_ = (
        [(n, i32) for n in ("role", "set_owner", "batch", "query_heads", "kv_heads", "head_dim", "q_dtype", "out_dtype",
                            "kv_dtype", "page_size", "capacity", "max_q_len", "max_kv_len", "max_total_q", "max_tiles")]
        + [(n, f32) for n in ("softmax_scale", "k_scale", "v_scale")]
        + [("budget", Budget)]
        + [(n, ptr) for n in ("q", "out", "lse")]
        + [(n, i64) for n in ("q_row_stride", "q_head_stride", "out_row_stride", "out_head_stride", "lse_row_stride")]
        + [(n, ptr) for n in ("cu_seqlens_q", "seq_lens_kv", "budget_lens", "k", "v")]
        + [(n, i64) for n in ("k_page_stride", "k_token_stride", "k_head_stride", "v_page_stride", "v_token_stride",
                              "v_head_stride")]
        + [("page_table", ptr), ("page_table_stride", i64)]
        + [(n, ptr) for n in ("cu_seqlens_kv", "positions", "counts", "tile_offsets", "head_map", "needed", "status")]
        + [("spare_multiprocessors", i32)])


DENSE, LAYER0, ANCHOR, REUSE = range(4)
ROLES = ["dense", "layer0", "anchor", "reuse"]
DTYPES = {torch.float16: 1, torch.bfloat16: 2}


def default_budget(percent):
    return Budget(percent_hundredths=int(percent * 100), round_up=1, floor=128, round_to=1, recent=128, tile=32, rolling=1)


class Kascade:
    def __init__(self, path):
        self.lib = ctypes.CDLL(path)
        self.lib.kascade_cuda_last_error.restype = ctypes.c_char_p

    def check(self, code):
        if code != 0:
            raise RuntimeError(self.lib.kascade_cuda_last_error().decode())

    def workspace(self, params):
        size = ctypes.c_size_t()
        self.check(self.lib.kascade_cuda_decode_workspace(ctypes.byref(params), ctypes.byref(size)))
        return torch.empty(size.value + 256, dtype=torch.uint8, device="cuda")

    def decode(self, params, workspace):
        base = (workspace.data_ptr() + 255) // 256 * 256
        self.check(self.lib.kascade_cuda_decode(
            ctypes.byref(params), ptr(base), ctypes.c_size_t(workspace.data_ptr() + workspace.numel() - base),
            ptr(torch.cuda.current_stream().cuda_stream)))


def int_tensor(values):
    return torch.tensor(values, dtype=torch.int32, device="cuda")


class Problem:
    """K and V [batch, length, kv_heads, head_dim] (in pages of random order when page_size is given) and calls on them."""

    def __init__(self, kascade, batch, length, query_heads=32, kv_heads=8, head_dim=128, dtype=torch.bfloat16, rows=1,
                 percent=10, page_size=0, max_length=0, kv=None):
        self.kascade, self.batch, self.length, self.rows = kascade, batch, length, rows
        self.kv_heads, self.head_dim, self.query_heads = kv_heads, head_dim, query_heads
        shape = (batch, length, kv_heads, head_dim)
        self.k, self.v = kv if kv is not None else (
            torch.randn(*shape, device="cuda", dtype=dtype), torch.randn(*shape, device="cuda", dtype=dtype))
        self.q = torch.randn(batch, rows, query_heads, head_dim, device="cuda", dtype=dtype)
        self.out = torch.empty_like(self.q)
        self.lse = torch.empty(batch * rows, query_heads, device="cuda")
        self.capacity = max(128, -(-int(percent * 100) * max(length, max_length) // 10000)) + 128
        self.positions = torch.empty(batch, kv_heads, self.capacity, dtype=torch.int32, device="cuda")
        self.counts = torch.zeros(batch, kv_heads, dtype=torch.int32, device="cuda")
        ones = torch.arange(batch + 1, dtype=torch.int32, device="cuda")
        self.cu_q, self.tiles = ones * rows, ones.clone()
        self.lens = torch.full((batch,), length, dtype=torch.int32, device="cuda")
        self.cu_kv = ones * length
        self.needed = torch.zeros(kv_heads, dtype=torch.uint8, device="cuda")
        self.needed[0] = 1
        p = Params(set_owner=0, batch=batch, query_heads=query_heads, kv_heads=kv_heads, head_dim=head_dim,
                   q_dtype=DTYPES[dtype], out_dtype=DTYPES[dtype], kv_dtype=DTYPES[dtype], capacity=self.capacity,
                   max_q_len=rows, max_kv_len=max(length, max_length), max_total_q=batch * rows, max_tiles=batch,
                   k_scale=1, v_scale=1, budget=default_budget(percent))
        p.q, p.out, p.lse = self.q.data_ptr(), self.out.data_ptr(), self.lse.data_ptr()
        p.q_row_stride = p.out_row_stride = query_heads * head_dim
        p.q_head_stride = p.out_head_stride = head_dim
        p.lse_row_stride = query_heads
        p.cu_seqlens_q, p.seq_lens_kv = self.cu_q.data_ptr(), self.lens.data_ptr()
        p.k, p.v = self.k.data_ptr(), self.v.data_ptr()
        p.k_token_stride = p.v_token_stride = kv_heads * head_dim
        p.k_head_stride = p.v_head_stride = head_dim
        p.positions, p.counts, p.tile_offsets = self.positions.data_ptr(), self.counts.data_ptr(), self.tiles.data_ptr()
        p.needed = self.needed.data_ptr()
        if page_size:
            pages = batch * length // page_size
            self.table = torch.randperm(pages, device="cuda").to(torch.int32).view(batch, -1).contiguous()
            p.page_table, p.page_table_stride = self.table.data_ptr(), length // page_size
            p.page_size = page_size
            p.k_page_stride = p.v_page_stride = page_size * kv_heads * head_dim
        else:
            p.cu_seqlens_kv = self.cu_kv.data_ptr()
        self.params = p

    def random_sets(self):
        """As many random positions a set as the anchor selected."""
        count = int(self.counts[0, 0])
        for b in range(self.batch):
            for g in range(self.kv_heads):
                self.positions[b, g, :count] = torch.randperm(self.length - self.rows, device="cuda")[:count].sort()[0]

    def call(self, role):
        p = Params.from_buffer_copy(self.params)
        p.role = role
        workspace = self.kascade.workspace(p)
        return lambda: self.kascade.decode(p, workspace)


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


FLUSH = None


def measure(call, count=10, warm=2):
    """Median and spread in milliseconds."""
    global FLUSH
    if FLUSH is None:
        FLUSH = torch.ones(128 << 20, dtype=torch.float32, device="cuda")
    times = []
    for i in range(count + warm):
        FLUSH.sum()
        a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        a.record()
        call()
        b.record()
        torch.cuda.synchronize()
        if i >= warm:
            times.append(a.elapsed_time(b))
    return statistics.median(times)


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


def check_dense(problem):
    """Largest difference of our dense output from fp32 attention of one sequence and KV head."""
    problem.call(DENSE)()
    torch.cuda.synchronize()
    group = problem.query_heads // problem.kv_heads
    q = problem.q[-1, -1, -group:].float()
    k, v = problem.k[-1, :, -1].float(), problem.v[-1, :, -1].float()
    exact = torch.softmax(q @ k.T / problem.head_dim ** 0.5, -1) @ v
    return float((problem.out[-1, -1, -group:].float() - exact).abs().max())


def bench(problem, with_peers=True, bandwidth=None, random_reuse=False):
    row = {"batch": problem.batch, "context": problem.length, "query_heads": problem.query_heads,
           "kv_heads": problem.kv_heads, "head_dim": problem.head_dim, "rows": problem.rows,
           "page_size": problem.params.page_size, "dtype": str(problem.q.dtype)[6:], "dense_error": None}
    if not problem.params.page_size and problem.length == problem.params.max_kv_len:
        row["dense_error"] = check_dense(problem)
    settle(problem)
    row["ms"] = {name: measure(graph_of(problem.call(role))) for role, name in enumerate(ROLES)}
    if random_reuse:
        problem.random_sets()
        row["ms"]["reuse_random_sets"] = measure(graph_of(problem.call(REUSE)))
    ms = row["ms"]
    row["mean_ms"] = (ms["layer0"] + 4 * ms["anchor"] + 27 * ms["reuse"]) / 32
    row["share_of_dense"] = {n: ms[n] / ms["dense"] for n in ROLES[1:]}
    dense_bytes = 2 * problem.k.numel() * problem.k.element_size()
    row["dense_gb_per_s"] = dense_bytes / ms["dense"] / 1e6
    if bandwidth:
        row["dense_share_of_bandwidth"] = row["dense_gb_per_s"] / bandwidth
    best = ms["dense"]
    if with_peers:
        row["peers_ms"] = peers(problem)
        figures = {n: t for n, t in row["peers_ms"].items() if not isinstance(t, str)}
        if figures:
            row["best_peer"] = min(figures, key=figures.get)
            best = figures[row["best_peer"]]
    row["best_peer_ms"] = best
    row["speedup"] = best / row["mean_ms"]
    print(f"B {row['batch']} L {row['context']} H {row['query_heads']}/{row['kv_heads']} d {row['head_dim']} rows "
          f"{row['rows']} page {row['page_size']} {row['dtype']}: "
          + " ".join(f"{n} {t:.4f}" for n, t in ms.items())
          + f" | peer {best:.4f} ({row.get('best_peer')}) mean {row['mean_ms']:.4f} speedup {row['speedup']:.2f} | share "
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
    torch.cuda.empty_cache()
    smi = subprocess.run(["nvidia-smi", "--query-gpu=name,driver_version,clocks.sm,clocks.mem", "--format=csv,noheader"],
                         capture_output=True, text=True).stdout.strip()
    result = {"date": datetime.date.today().isoformat(), "commit": args.commit, "device": smi,
              "torch": torch.__version__, "read_gb_per_s": bandwidth, "budget": "default, 10 %", "rows": []}
    print("device", smi, "read GB/s", round(bandwidth), flush=True)

    def run(*shape, with_peers=True, **options):
        problem = Problem(kascade, *shape, **options)
        result["rows"].append(bench(problem, with_peers and not args.no_peers, bandwidth,
                                    random_reuse=with_peers))
        del problem
        torch.cuda.empty_cache()
        with open(args.output, "w") as file:
            json.dump(result, file, indent=1)

    for shape in ((64, 131072), (64, 32768), (8, 131072), (4, 131072), (1, 131072), (1, 32768)):
        run(*shape)
    if args.set == "full":
        for page_size in (1, 16, 64):
            run(16, 131072, with_peers=False, page_size=page_size)
        run(16, 131072, with_peers=False)
        run(16, 131072, with_peers=False, rows=4)
        run(16, 131072, with_peers=False, dtype=torch.float16)
        run(16, 131072, with_peers=False, query_heads=12, kv_heads=2)
        run(16, 131072, with_peers=False, query_heads=9, kv_heads=3, head_dim=64)
        run(64, 2048, with_peers=False)
        run(64, 2048, with_peers=False, max_length=131072)
        run(16, 262144, with_peers=False)
        run(16, 524288, with_peers=False)
    result["clocks_after"] = subprocess.run(["nvidia-smi", "--query-gpu=clocks.sm,clocks.mem", "--format=csv,noheader"],
                                            capture_output=True, text=True).stdout.strip()
    with open(args.output, "w") as file:
        json.dump(result, file, indent=1)


if __name__ == "__main__":
    main()
