#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes the seeds in corpus/gguf and corpus/safetensors: small valid files, and ones with a single fault."""

import json
import pathlib
import struct

CORPUS = pathlib.Path(__file__).parent / "corpus"
UINT32, INT32, FLOAT32, BOOL, STRING, ARRAY = 4, 5, 6, 7, 8, 9
F32, F16, Q4_0, Q8_0 = 0, 1, 2, 8
BLOCKS = {F32: (1, 4), F16: (1, 2), Q4_0: (32, 18), Q8_0: (32, 34)}
TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "a", "b", "c", "\u0120", "ab", "abc", "1", "2", "3"]


def text(value):
    data = value.encode()
    return struct.pack("<Q", len(data)) + data


def value(kind, content):
    if kind == STRING:
        return struct.pack("<I", STRING) + text(content)
    if kind == ARRAY:
        element, items = content
        pack = {STRING: text, FLOAT32: lambda x: struct.pack("<f", x), INT32: lambda x: struct.pack("<i", x)}[element]
        return struct.pack("<IIQ", ARRAY, element, len(items)) + b"".join(map(pack, items))
    return struct.pack("<I" + {UINT32: "I", FLOAT32: "f", BOOL: "?"}[kind], kind, content)


def gguf(architecture="llama", sentencepiece=False, version=3, extra=None, tensors_extra=()):
    """A model of one layer: hidden 32, ffn 32, two query heads and one KV head of 16."""
    keys = {
        "general.architecture": (STRING, architecture),
        "block_count": (UINT32, 1),
        "context_length": (UINT32, 64),
        "embedding_length": (UINT32, 32),
        "feed_forward_length": (UINT32, 32),
        "attention.head_count": (UINT32, 2),
        "attention.head_count_kv": (UINT32, 1),
        "attention.layer_norm_rms_epsilon": (FLOAT32, 1e-5),
        "rope.freq_base": (FLOAT32, 10000.0),
        "tokenizer.ggml.model": (STRING, "llama" if sentencepiece else "gpt2"),
        "tokenizer.ggml.tokens": (ARRAY, (STRING, TOKENS)),
        "tokenizer.ggml.token_type": (ARRAY, (INT32, [2 if sentencepiece else 3, 3, 3] + [1] * 9)),
        "tokenizer.ggml.eos_token_id": (UINT32, 2),
        "tokenizer.ggml.bos_token_id": (UINT32, 1),
        "tokenizer.ggml.add_bos_token": (BOOL, False),
        "tokenizer.chat_template": (STRING, "{{ messages[0]['content'] }}"),
    }
    if sentencepiece:
        keys["tokenizer.ggml.unknown_token_id"] = (UINT32, 0)
        keys["tokenizer.ggml.scores"] = (ARRAY, (FLOAT32, [-float(i) for i in range(len(TOKENS))]))
    else:
        keys["tokenizer.ggml.pre"] = (STRING, "qwen2" if architecture.startswith("qwen") else "smollm")
        keys["tokenizer.ggml.merges"] = (ARRAY, (STRING, ["a b", "ab c"]))
    keys.update(extra or {})
    plain = ("general.", "tokenizer.")
    metadata = b"".join(
        text(key if key.startswith(plain) else f"{architecture}.{key}") + value(*content) for key, content in keys.items()
    )

    tensors = [
        ("token_embd.weight", [32, len(TOKENS)], Q8_0),
        ("output_norm.weight", [32], F32),
        ("blk.0.attn_norm.weight", [32], F32),
        ("blk.0.attn_q.weight", [32, 32], Q4_0),
        ("blk.0.attn_k.weight", [32, 16], F16),
        ("blk.0.attn_v.weight", [32, 16], F16),
        ("blk.0.attn_output.weight", [32, 32], Q4_0),
        ("blk.0.ffn_norm.weight", [32], F32),
        ("blk.0.ffn_gate.weight", [32, 32], Q4_0),
        ("blk.0.ffn_up.weight", [32, 32], Q4_0),
        ("blk.0.ffn_down.weight", [32, 32], Q4_0),
        *tensors_extra,
    ]
    infos, data = b"", b""
    for name, dimensions, kind in tensors:
        elements, size = BLOCKS[kind]
        rows = dimensions[1] if len(dimensions) > 1 else 1
        infos += text(name) + struct.pack(f"<I{len(dimensions)}QIQ", len(dimensions), *dimensions, kind, len(data))
        block = {F32: struct.pack("<f", 1), F16: b"\x00\x2c"}.get(kind, b"\x00\x2c" + b"\x5a" * (size - 2))
        data += block * (dimensions[0] // elements * rows)
        data += b"\0" * (-len(data) % 32)
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(keys)) + metadata + infos
    return head + b"\0" * (-len(head) % 32) + data


def gguf_seeds():
    whole = gguf()
    return {
        "llama": whole,
        "sentencepiece": gguf(sentencepiece=True, version=2),
        "rope_factors": gguf(tensors_extra=[("rope_freqs.weight", [8], F32)]),
        "qwen2": gguf(
            "qwen2",
            tensors_extra=[(f"blk.0.attn_{part}.bias", [32 if part == "q" else 16], F32) for part in "qkv"],
        ),
        "qwen3": gguf("qwen3", tensors_extra=[(f"blk.0.attn_{part}_norm.weight", [16], F32) for part in "qk"]),
        "linear": gguf(extra={"rope.scaling.type": (STRING, "linear"), "rope.scaling.factor": (FLOAT32, 2.0)}),
        "softcap": gguf(extra={"attn_logit_softcapping": (FLOAT32, 50.0)}),
        "alignment": gguf(extra={"general.alignment": (UINT32, 64)}),
        "truncated": whole[: len(whole) // 2],
        "web_page": b"<!DOCTYPE html><html><body>404</body></html>",
    }


CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 1,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": None,
    "vocab_size": 8,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e4,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "eos_token_id": [5, 6],
    "tie_word_embeddings": True,
}
LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
TOKENIZER = {
    "added_tokens": [{"id": 5, "content": "<|im_end|>", "special": True}, {"id": 6, "content": "<tool>"}],
    "normalizer": {"type": "NFC"},
    "pre_tokenizer": {
        "type": "Sequence",
        "pretokenizers": [
            {"type": "Split", "pattern": {"Regex": LLAMA3_PATTERN}, "behavior": "Isolated", "invert": False},
            BYTE_LEVEL,
        ],
    },
    "post_processor": {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<tool>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
    },
    "decoder": {"type": "ByteLevel"},
    "model": {
        "type": "BPE",
        "vocab": {"a": 0, "b": 1, "c": 2, "ab": 3, "abc": 4},
        "merges": [["a", "b"], ["ab", "c"]],
        "ignore_merges": True,
    },
}
SENTENCEPIECE = {
    "added_tokens": [{"id": 0, "content": "<unk>", "special": True}],
    "pre_tokenizer": {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "first", "split": False},
    "decoder": {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "Fuse"}]},
    "model": {
        "type": "BPE",
        "unk_token": "<unk>",
        "byte_fallback": True,
        "vocab": {"<unk>": 0, "<0x0A>": 1, "\u2581": 2, "a": 3, "\u2581a": 4},
        "merges": ["\u2581 a"],
    },
}
TOKENIZER_CONFIG = {
    "eos_token": {"content": "<|im_end|>"},
    "add_bos_token": False,
    "tokenizer_class": "LlamaTokenizerFast",
    "chat_template": [{"name": "default", "template": "{{ bos_token }}"}],
}


def safetensors_tensors():
    shapes = {
        "model.embed_tokens.weight": [8, 16],
        "model.norm.weight": [16],
        "model.layers.0.input_layernorm.weight": [16],
        "model.layers.0.post_attention_layernorm.weight": [16],
        "model.layers.0.self_attn.q_proj.weight": [16, 16],
        "model.layers.0.self_attn.k_proj.weight": [8, 16],
        "model.layers.0.self_attn.v_proj.weight": [8, 16],
        "model.layers.0.self_attn.o_proj.weight": [16, 16],
        "model.layers.0.mlp.gate_proj.weight": [32, 16],
        "model.layers.0.mlp.up_proj.weight": [32, 16],
        "model.layers.0.mlp.down_proj.weight": [16, 32],
    }
    header, end = {"__metadata__": {"format": "pt"}}, 0
    for name, shape in shapes.items():
        size = 2 * shape[0] * (shape[1] if len(shape) > 1 else 1)
        header[name] = {"dtype": "F16", "shape": shape, "data_offsets": [end, end + size]}
        end += size
    head = json.dumps(header).encode()
    return struct.pack("<Q", len(head)) + head + b"\x2c" * end, list(shapes)


def safetensors_seeds():
    """The first byte is the number of the file in fuzz_safetensors.cc's list that the rest replaces."""
    whole, names = safetensors_tensors()
    encode = lambda number, content: bytes([number]) + json.dumps(content, ensure_ascii=False).encode()
    return {
        "tensors": b"\0" + whole,
        "tensors_truncated": b"\0" + whole[:-1],
        "header_length": b"\0" + b"\xff" * 8 + whole[8:],
        "config": encode(1, CONFIG),
        "config_yarn": encode(1, {**CONFIG, "rope_scaling": {"type": "yarn", "factor": 4.0}}),
        "config_qwen": encode(1, {**CONFIG, "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"],
                                  "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}),
        "tokenizer": encode(2, TOKENIZER),
        "tokenizer_sentencepiece": encode(2, SENTENCEPIECE),
        "tokenizer_config": encode(3, TOKENIZER_CONFIG),
        "index": encode(4, {"metadata": {}, "weight_map": {name: "shard.safetensors" for name in names}}),
        "index_escape": encode(4, {"weight_map": {name: "../shard.safetensors" for name in names}}),
    }


def main():
    for folder, seeds in {"gguf": gguf_seeds(), "safetensors": safetensors_seeds()}.items():
        (CORPUS / folder).mkdir(parents=True, exist_ok=True)
        for name, content in seeds.items():
            (CORPUS / folder / name).write_bytes(content)


if __name__ == "__main__":
    main()
