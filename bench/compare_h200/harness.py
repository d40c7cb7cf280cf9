# SPDX-License-Identifier: Apache-2.0
"""What the two comparisons share: libkascade_cuda called through its C interface, problems with random inputs, timing."""
import ctypes
import datetime
import json
import statistics
import subprocess

import torch

i32, i64, f32, ptr = ctypes.c_int32, ctypes.c_int64, ctypes.c_float, ctypes.c_void_p


class Budget(ctypes.Structure):
    _fields_ = [(n, i32) for n in (
        "percent_hundredths", "round_up", "floor", "round_to", "sinks", "recent", "forced_charged", "own_tile", "tile",
        "rolling", "rolling_min_rows", "rolling_capped")]


class Params(ctypes.Structure):
    """kascade_attention_params of src/attention/cuda/c_api.h."""
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

    def call(self, params, tile=None):
        """A function that enqueues the call and owns its workspace; tile: of a prefill call, None for a decode step."""
        name, arguments = ("decode", ()) if tile is None else ("prefill", (i32(tile),))
        enqueue = getattr(self.lib, f"kascade_cuda_{name}")
        size = ctypes.c_size_t()
        self.check(getattr(self.lib, f"kascade_cuda_{name}_workspace")(ctypes.byref(params), *arguments, ctypes.byref(size)))
        workspace = torch.empty(size.value + 256, dtype=torch.uint8, device="cuda")
        base = (workspace.data_ptr() + 255) // 256 * 256

        def run(kept=workspace):
            self.check(enqueue(ctypes.byref(params), *arguments, ptr(base),
                               ctypes.c_size_t(kept.data_ptr() + kept.numel() - base),
                               ptr(torch.cuda.current_stream().cuda_stream)))

        run.workspace_bytes = size.value
        return run


class Problem:
    """rows query rows a sequence, the last ones, over keys [batch, length, kv_heads, head_dim] (in pages of random order when
    page_size is given), and calls on them; tile: query tokens of a prefill tile, None for a decode step."""

    def __init__(self, kascade, batch, length, rows=1, tile=None, query_heads=32, kv_heads=8, head_dim=128,
                 dtype=torch.bfloat16, percent=10, page_size=0, max_length=0):
        self.kascade, self.batch, self.length, self.rows, self.tile = kascade, batch, length, rows, tile
        self.kv_heads, self.head_dim, self.query_heads = kv_heads, head_dim, query_heads

        def random(*shape):
            return torch.randn(*shape, device="cuda", dtype=dtype)

        self.k, self.v = random(batch, length, kv_heads, head_dim), random(batch, length, kv_heads, head_dim)
        self.q = random(batch, rows, query_heads, head_dim)
        self.out = torch.empty_like(self.q)
        self.lse = torch.empty(batch * rows, query_heads, device="cuda")
        tiles = 1 if tile is None else (length - 1) // tile - (length - rows) // tile + 1
        self.capacity = max(128, -(-int(percent * 100) * max(length, max_length) // 10000)) + 128
        self.positions = torch.empty(batch * tiles, kv_heads, self.capacity, dtype=torch.int32, device="cuda")
        self.counts = torch.zeros(batch * tiles, kv_heads, dtype=torch.int32, device="cuda")
        ones = torch.arange(batch + 1, dtype=torch.int32, device="cuda")
        self.cu_q, self.tiles, self.cu_kv = ones * rows, ones * tiles, ones * length
        self.lens = torch.full((batch,), length, dtype=torch.int32, device="cuda")
        self.needed = torch.zeros(kv_heads, dtype=torch.uint8, device="cuda")
        self.needed[0] = 1
        p = Params(set_owner=0, batch=batch, query_heads=query_heads, kv_heads=kv_heads, head_dim=head_dim,
                   q_dtype=DTYPES[dtype], out_dtype=DTYPES[dtype], kv_dtype=DTYPES[dtype], capacity=self.capacity,
                   max_q_len=rows, max_kv_len=max(length, max_length), max_total_q=batch * rows, max_tiles=batch * tiles,
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
        """As many random positions a set as the anchor of a decode step selected."""
        count = int(self.counts[0, 0])
        for b in range(self.batch):
            for g in range(self.kv_heads):
                self.positions[b, g, :count] = torch.randperm(self.length - self.rows, device="cuda")[:count].sort()[0]

    def call(self, role, one_needed=False):
        """one_needed: of layer 0's sets, only the first KV head's is read by later layers."""
        p = Params.from_buffer_copy(self.params)
        p.role = role
        if one_needed:
            p.needed = self.needed.data_ptr()
        return self.kascade.call(p, self.tile)

    def calls(self):
        """The four roles by name; layer 0 with one needed head."""
        return {name: self.call(role, one_needed=role == LAYER0) for role, name in enumerate(ROLES)}

    def dense_error(self, most_rows=64):
        """Largest difference of our dense output from fp32 attention, over the last sequence's last rows and KV head."""
        self.call(DENSE)()
        torch.cuda.synchronize()
        group = self.query_heads // self.kv_heads
        rows = min(most_rows, self.rows)
        q = self.q[-1, -rows:, -group:].float().transpose(0, 1)
        k, v = self.k[-1, :, -1].float(), self.v[-1, :, -1].float()
        scores = q @ k.T / self.head_dim ** 0.5
        keys = torch.arange(self.length, device="cuda")
        scores.masked_fill_(keys[None, None, :] > (keys[-rows:])[None, :, None], float("-inf"))
        exact = (torch.softmax(scores, -1) @ v).transpose(0, 1)
        return float((self.out[-1, -rows:, -group:].float() - exact).abs().max())

    def row(self):
        """The problem in words for a result."""
        return {"batch": self.batch, "context": self.length, "rows": self.rows, "query_heads": self.query_heads,
                "kv_heads": self.kv_heads, "head_dim": self.head_dim, "page_size": self.params.page_size,
                "dtype": str(self.q.dtype)[6:], "dense_error": None}


FLUSH = None


def measure(call, count=10, warm=2):
    """Median in milliseconds by events of the device, each call after L2 was flushed."""
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


def mean_of(ms):
    """Of a generation by the published Llama plan: 1 layer 0, 4 anchors, 27 reuse layers."""
    return (ms["layer0"] + 4 * ms["anchor"] + 27 * ms["reuse"]) / 32


def take_best_peer(row):
    """The fastest of peers_ms; those that did not run have an error's text there."""
    figures = {n: t for n, t in row["peers_ms"].items() if not isinstance(t, str)}
    if figures:
        row["best_peer"] = min(figures, key=figures.get)
        row["best_peer_ms"] = figures[row["best_peer"]]
        row["dense_of_best_peer"] = row["ms"]["dense"] / row["best_peer_ms"]
        row["speedup"] = row["best_peer_ms"] / row["mean_ms"]


def smi(query):
    return subprocess.run(["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"], capture_output=True,
                          text=True).stdout.strip()


class Result:
    """A JSON file written again after every row, so that a run that is cut off leaves what it has."""

    def __init__(self, path, commit, **fields):
        self.path = path
        self.fields = {"date": datetime.date.today().isoformat(), "commit": commit,
                       "device": smi("name,driver_version,clocks.sm,clocks.mem"), "torch": torch.__version__, **fields,
                       "rows": []}
        print("device", self.fields["device"], fields, flush=True)

    def save(self):
        torch.cuda.empty_cache()
        self.fields["clocks_after"] = smi("clocks.sm,clocks.mem")
        with open(self.path, "w") as file:
            json.dump(self.fields, file, indent=1)
