# SPDX-License-Identifier: Apache-2.0
"""Every verb on the real model: documents, exit codes, errors."""

import json
import os
import signal
import subprocess
import time

import cli
from cli import MODEL, PROGRAM, CliTest, run

VERBS = ["inspect", "tokenize", "calibrate", "plan", "generate", "chat", "perplexity", "bench", "demo"]
PROMPT = "The capital of France is"


class Usage(CliTest):
    def test_help_has_an_example_for_every_verb(self):
        for verb in VERBS:
            text = self.ok(verb, "--help").stdout.decode()
            self.assertIn("Example: ", text, verb)
        self.assertIn("Example: ", self.ok("--help").stdout.decode())
        for verb in ("show", "import", "diff"):
            self.assertIn(f"Example: kascade plan {verb} ", self.ok("plan", verb, "--help").stdout.decode())

    def test_bad_usage_exits_with_2(self):
        for arguments in (
            [],
            ["juggle"],
            ["generate", "--model", MODEL],
            ["generate", "--model", MODEL, "--prompt", "a", "--prompt-file", "b"],
            ["generate", "--model", MODEL, "--prompt", "a", "--max-tokens", "-1"],
            ["generate", "--model", MODEL, "--prompt", "a", "--max-tokens", "99999999999999999999"],
            ["generate", "--model", MODEL, "--prompt", "a", "--threads", "-1"],
            ["generate", "--model", MODEL, "--prompt", "a", "--compute", "f8"],
            ["perplexity", "--model", MODEL, "--text", "a b", "--prefill", "0"],
            ["calibrate", "--model", MODEL],
            ["plan"],
        ):
            self.fails(*arguments, code=2)

    def test_version(self):
        self.assertRegex(self.ok("--version").stdout.decode(), r"^\d+\.\d+\.\d+\n$")


class Inspect(CliTest):
    def test_document(self):
        document = self.json("inspect", MODEL)
        expected = {
            "architecture": "llama", "layers": 30, "query_heads": 9, "kv_heads": 3, "head_dim": 64, "context": 8192,
            "vocabulary": 49152, "kv_bytes_per_token": 2 * 30 * 3 * 64 * 2,
        }
        self.assertEqual({key: document[key] for key in expected}, expected)
        self.assertGreater(document["weight_bytes"], 90_000_000)
        self.assertLess(document["weight_bytes"], os.path.getsize(MODEL))
        self.assertIn("smollm", document["tokenizer"])

    def test_not_a_model(self):
        for name, content in (("empty.gguf", b""), ("page.gguf", b"<!DOCTYPE html><html></html>"), ("zeros.gguf", bytes(4096))):
            self.fails("inspect", self.write(name, content), says=[name])
        self.fails("inspect", self.path("absent.gguf"), says=["absent.gguf"])
        self.fails("inspect", self.folder, says=["config.json"])

    def test_truncated(self):
        with open(MODEL, "rb") as file:
            head = file.read(3_000_000)
        for size in (3, 4, 8, 24, 1000, 100_000, 2_999_999):
            self.fails("inspect", self.write("cut.gguf", head[:size]), says=["cut.gguf"])


class Tokenize(CliTest):
    def test_round_trip(self):
        text = "Hello,  world!\n\n 1234 ünïcode 中文 \U0001F40B\t<|im_end|>"
        ids = self.json("tokenize", "--model", MODEL, "--text", text)["ids"]
        self.assertNotIn(2, ids)
        back = self.json("tokenize", "--model", MODEL, "--decode", ",".join(map(str, ids)))["text"]
        self.assertEqual(back, text)
        self.assertIn(2, self.json("tokenize", "--model", MODEL, "--text", text, "--special")["ids"])

    def test_file_is_taken_byte_for_byte(self):
        for content in (b"", b"\n", b"a\r\nb\n", b"\xef\xbb\xbfbom", b"\x80\x00 not utf-8 \xc3"):
            path = self.write("text", content)
            ids = self.json("tokenize", "--model", MODEL, "--file", path)["ids"]
            if not ids:
                self.assertEqual(content, b"")
                continue
            decoded = self.ok("tokenize", "--model", MODEL, "--decode", ",".join(map(str, ids))).stdout
            self.assertEqual(decoded, content + b"\n")

    def test_ids_outside_the_vocabulary(self):
        self.fails("tokenize", "--model", MODEL, "--decode", "1,49152", says=["49151", "49152"])
        self.fails("tokenize", "--model", MODEL, "--decode=-1", says=["-1"])


class Generate(CliTest):
    def test_document_and_determinism(self):
        arguments = ["generate", "--model", MODEL, "--prompt", PROMPT, "--max-tokens", 12]
        one = self.json(*arguments, "--threads", 1)
        two = self.json(*arguments, "--threads", 2)
        self.assertEqual(one["token_ids"], two["token_ids"])
        self.assertEqual(one["prompt_tokens"], 5)
        self.assertLessEqual(one["new_tokens"], 12)
        self.assertIn("Paris", one["text"])
        self.assertIn("dense", one["policy"])
        self.assertIn(one["device"], ("cpu", "cuda"))
        for key in ("prefill_tokens_per_s", "decode_tokens_per_s"):
            self.assertGreater(one[key], 0)
        streamed = self.ok(*arguments).stdout.decode()
        self.assertEqual(streamed, one["text"] + "\n")

    def test_sampling_follows_the_seed(self):
        arguments = ["generate", "--model", MODEL, "--prompt", PROMPT, "--max-tokens", 16, "--temperature", 1.2, "--top-p", 0.95]
        texts = [self.json(*arguments, "--seed", seed)["text"] for seed in (1, 1, 2)]
        self.assertEqual(texts[0], texts[1])
        self.assertNotEqual(texts[0], texts[2])

    def test_stop_and_tokens(self):
        full = self.json("generate", "--model", MODEL, "--prompt", PROMPT, "--max-tokens", 12)
        stop = full["text"][5:9]
        cut = self.json("generate", "--model", MODEL, "--prompt", PROMPT, "--max-tokens", 12, "--stop", stop)
        self.assertEqual(cut["text"], full["text"][: full["text"].index(stop)])
        ids = self.json("tokenize", "--model", MODEL, "--text", PROMPT)["ids"]
        tokens = self.write("ids.json", json.dumps(ids))
        self.assertEqual(self.json("generate", "--model", MODEL, "--tokens", tokens, "--max-tokens", 12)["text"], full["text"])

    def test_ends_of_the_range(self):
        none = self.json("generate", "--model", MODEL, "--prompt", PROMPT, "--max-tokens", 0)
        self.assertEqual((none["text"], none["new_tokens"]), ("", 0))
        self.fails("generate", "--model", MODEL, "--prompt", "", says=["at least one token"])
        self.fails("generate", "--model", MODEL, "--prompt", PROMPT, "--max-tokens", 9000, says=["8192"])
        long = self.write("long.json", json.dumps([5] * 8193))
        self.fails("generate", "--model", MODEL, "--tokens", long, "--max-tokens", 1, says=["8193", "8192"])

    def test_bad_settings(self):
        for option, value in (("--temperature", "nan"), ("--temperature", "-1"), ("--top-p", "0"), ("--top-p", "1.5"),
                              ("--top-k", "-2"), ("--percent", "0"), ("--percent", "101"), ("--tile", "129"),
                              ("--policy", "magic")):
            policy = ["--policy", "oracle-topk"] if option in ("--percent", "--tile") else []
            self.fails("generate", "--model", MODEL, "--prompt", PROMPT, option + "=" + value, *policy,
                       says=[option.strip("-").replace("-", "")[:3]])
        self.fails("generate", "--model", MODEL, "--prompt", PROMPT, "--policy", "kascade", says=["plan"])
        self.fails("generate", "--model", MODEL, "--prompt", PROMPT, "--device", "cuda", says=["CUDA"])

    def test_bad_token_files(self):
        for content in ("", "{}", "[1, 2", "[1, -2]", "[1, 49152]", "[1, 2.5]", '["a"]', "[" * 5000):
            path = self.write("ids.json", content)
            self.fails("generate", "--model", MODEL, "--tokens", path, says=["ids.json"])

    def test_output_that_cannot_be_written(self):
        with open("/dev/full", "wb") as full:
            process = subprocess.run([PROGRAM, "generate", "--model", MODEL, "--prompt", PROMPT, "--json"],
                                     stdout=full, stderr=subprocess.PIPE)
        self.assertEqual(process.returncode, 1)
        self.assertIn(b"standard output", process.stderr)
        reader, writer = os.pipe()
        os.close(reader)
        process = subprocess.run([PROGRAM, "generate", "--model", MODEL, "--prompt", PROMPT], stdout=writer,
                                 stderr=subprocess.PIPE)
        os.close(writer)
        self.assertEqual(process.returncode, 1)

    def test_interrupt(self):
        process = subprocess.Popen([PROGRAM, "generate", "--model", MODEL, "--prompt", PROMPT, "--max-tokens", "8000",
                                    "--ignore-end"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        process.stdout.read(20)
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=60)
        self.assertEqual(process.returncode, 1)
        self.assertIn(b"interrupted", error)


class Chat(CliTest):
    def test_reads_a_pipe(self):
        lines = b"What is the capital of France?\nAnd of Italy?\n"
        document = self.json("chat", "--model", MODEL, "--max-tokens", 24, stdin=lines)
        self.assertEqual([turn["user"] for turn in document["turns"]], lines.decode().splitlines())
        self.assertIn("Paris", document["turns"][0]["assistant"])
        self.assertGreater(document["turns"][1]["cached_tokens"], 10)
        self.assertEqual(self.ok("chat", "--model", MODEL, stdin=b"").stdout, b"")

    def test_context_of_the_cache(self):
        self.ok("chat", "--model", MODEL, "--context", 64, "--max-tokens", 2, stdin=b"Hi\n")
        self.fails("chat", "--model", MODEL, "--context", 64, "--max-tokens", 2, stdin=b"whale " * 90 + b"\n", says=["KV cache"])
        self.fails("chat", "--model", MODEL, "--context", 8193, says=["--context", 8193, 8192])


class Perplexity(CliTest):
    def test_regions(self):
        ids = self.json("tokenize", "--model", MODEL, "--text", "It was the best of times, it was the worst of times. " * 12)["ids"]
        tokens = self.write("ids.json", json.dumps(ids))
        document = self.json("perplexity", "--model", MODEL, "--tokens", tokens, "--prefill", 100, "--score-last", 40,
                             "--per-token")
        self.assertEqual(document["prefill"]["positions"], 40)
        self.assertEqual(document["first"]["positions"], 1)
        self.assertEqual(document["decode"]["positions"], len(ids) - 101)
        self.assertEqual(len(document["decode"]["nll_per_token"]), len(ids) - 101)
        for region in ("prefill", "first", "decode"):
            self.assertEqual(document[region]["kl"], 0)
            self.assertEqual(document[region]["top1"], 1)
            self.assertLessEqual(document[region]["nll_low"], document[region]["nll"])
        whole = self.json("perplexity", "--model", MODEL, "--tokens", tokens)
        self.assertEqual(whole["prefill"]["positions"], len(ids) - 1)
        self.assertEqual(whole["decode"]["positions"], 0)

    def test_sparse_differs_from_dense(self):
        text = "".join(f"Item {i} costs {i * 7 % 101} crowns. " for i in range(120))
        document = self.json("perplexity", "--model", MODEL, "--text", text, "--policy", "oracle-topk", "--prefill", 600)
        self.assertGreater(document["decode"]["kl"], 0)
        self.assertLess(document["decode"]["kl"], 1)
        self.assertEqual(document["policy"], "oracle-topk")

    def test_too_short(self):
        self.fails("perplexity", "--model", MODEL, "--text", "", says=["2"])


class Plans(CliTest):
    """Plans made from the published procedure on two short prompts: seconds, not minutes."""

    def calibrate(self, output, *more, **kwargs):
        prompts = self.write("prompts.jsonl", "".join(
            json.dumps({"prompt": " ".join(f"Line {i}: the {word} is number {i * 13 % 97}." for i in range(60))}) + "\n"
            for word in ("apple", "river")))
        return self.json("calibrate", "--model", MODEL, "--prompts", prompts, "--method", "budget", "--anchors", 5,
                         "--no-validate", "--output", output, *more, **kwargs)

    def test_life_of_a_plan(self):
        plan = self.path("plan.json")
        document = self.calibrate(plan)
        self.assertEqual(len(document["anchors"]), 5)
        self.assertEqual(document["anchors"][0], 0)
        shown = self.json("plan", "show", plan)
        self.assertEqual(shown["format"], "kascade-plan")
        self.assertEqual(shown["anchors"], document["anchors"])
        svg = self.path("similarity.svg")
        self.ok("plan", "show", plan, "--svg", svg)
        with open(svg) as file:
            self.assertIn("<svg", file.read(200))
        again = self.path("again.json")
        self.calibrate(again, "--threads", 1)
        with open(plan, "rb") as a, open(again, "rb") as b:
            self.assertEqual(a.read(), b.read())
        self.assertTrue(self.json("plan", "diff", plan, again)["equal"])
        sparse = self.json("generate", "--model", MODEL, "--plan", plan, "--prompt", PROMPT, "--max-tokens", 4)
        self.assertIn("kascade", sparse["policy"])

    def test_plan_of_another_model(self):
        plan = self.path("plan.json")
        self.calibrate(plan)
        with open(plan) as file:
            document = json.load(file)
        document["model"]["fingerprint"] = "0123456789abcdef"
        other = self.write("other.json", json.dumps(document))
        arguments = ["generate", "--model", MODEL, "--plan", other, "--prompt", PROMPT, "--max-tokens", 2]
        self.fails(*arguments, says=["fingerprint", "0123456789abcdef"])
        self.assertIn(b"warning", self.ok(*arguments, "--allow-other-model").stderr)
        document["model"]["layers"] = 31
        self.fails("generate", "--model", MODEL, "--plan", self.write("shape.json", json.dumps(document)), "--prompt", PROMPT)
        document["version"] = 99
        self.fails("plan", "show", self.write("version.json", json.dumps(document)), says=["version", "99"])
        self.fails("plan", "show", self.write("cut.json", json.dumps(document)[:200]), says=["cut.json"])

    def test_import(self):
        fixtures = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "golden", "fixtures")
        output = self.path("imported.json")
        document = self.json("plan", "import", os.path.join(fixtures, "plan_m5.npy"), "--model", MODEL, "--anchors",
                             "0,1,3,12,24", "--output", output)
        self.assertEqual(document["anchors"], [0, 1, 3, 12, 24])
        self.assertEqual(self.json("plan", "show", output)["model"]["head_dim"], 64)
        self.fails("plan", "import", os.path.join(fixtures, "plan_m5.npy"), "--model", MODEL, "--anchors", "0,2", "--output",
                   self.path("wrong.json"), says=["2"])
        self.assertFalse(os.path.exists(self.path("wrong.json")))

    def test_interrupted_calibration_leaves_no_plan_and_resumes(self):
        prompts = self.write("prompts.jsonl", "".join(
            json.dumps({"tokens": [(i * 31 + seed * 7) % 40000 + 100 for i in range(1500)]}) + "\n" for seed in range(6)))
        plan = self.path("plan.json")
        arguments = ["calibrate", "--model", MODEL, "--prompts", prompts, "--method", "published", "--anchors", "4", "--no-validate",
                     "--output", plan, "--threads", "1", "--json"]
        process = subprocess.Popen([PROGRAM, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        deadline = time.time() + 120
        while not os.path.exists(plan + ".partial") and process.poll() is None and time.time() < deadline:
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
        self.assertEqual(process.returncode, 1)
        self.assertFalse(os.path.exists(plan))
        resumed = json.loads(self.ok(*arguments).stdout)
        self.assertGreaterEqual(resumed["resumed_prompts"], 1)
        whole = self.path("whole.json")
        arguments[arguments.index(plan)] = whole
        self.ok(*arguments)
        with open(plan, "rb") as a, open(whole, "rb") as b:
            self.assertEqual(a.read(), b.read())
        self.assertEqual(sorted(os.listdir(self.folder)), ["plan.json", "prompts.jsonl", "whole.json"])

    def test_outputs_and_prompts_that_cannot_be(self):
        self.fails("calibrate", "--model", MODEL, "--output", self.path("no/such/folder/plan.json"), says=["folder"])
        self.fails("calibrate", "--model", MODEL, "--output", "/dev/full", "--prompts", self.path("absent.jsonl"),
                   says=["absent.jsonl"])
        for line, field in (('{"prompt": 5}', "prompt"), ('{"context": "a"}', "input"), ("[]", "object"), ("{", "line"),
                            ('{"tokens": [1, 99999999]}', "tokens")):
            prompts = self.write("bad.jsonl", '{"prompt": "fine text"}\n' + line + "\n")
            error = self.fails("calibrate", "--model", MODEL, "--prompts", prompts, "--output", self.path("p.json"),
                               says=["bad.jsonl"])
            self.assertIn("2", error)
            self.assertFalse(os.path.exists(self.path("p.json")), field)


if __name__ == "__main__":
    cli.main()
