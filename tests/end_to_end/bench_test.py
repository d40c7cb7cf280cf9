# SPDX-License-Identifier: Apache-2.0
"""bench and inspect --device cuda: documents, figure, exit codes, errors."""

import json
import os
import xml.etree.ElementTree

import cli
from cli import MODEL, CliTest, run

FOLDER = os.path.dirname(os.path.abspath(__file__))
PLAN = os.path.join(FOLDER, "..", "..", "data", "plans", "llama-3.1-8b.json")
TINY = os.path.join(FOLDER, "..", "fixtures", "models", "llama.gguf")


class BenchEndToEnd(CliTest):
    def bench(self, *arguments):
        return self.json("bench", "e2e", "--model", TINY, "--device", "cpu", "--steps", 2, "--repetitions", 2, *arguments)

    def test_document_and_figure(self):
        figure = self.path("where.svg")
        document = self.bench("--published", "--work", "decode:3x48,prefill:100", "--figure", figure, "--commit", "abc")
        self.assertEqual(document["machine"]["device"], "cpu")
        self.assertEqual(document["model"]["weights"], "file")
        self.assertEqual(document["commit"], "abc")
        self.assertIn("equal distances", document["plan"])
        self.assertEqual([work["name"] for work in document["work"]], ["decode:3x48", "prefill:100"])
        for work in document["work"]:
            self.assertEqual([run["policy"] for run in work["runs"]], ["dense", "kascade"])
            self.assertEqual(work["runs"][0]["ratio_to_dense"], 1)
            for one in work["runs"]:
                self.assertGreater(one["tokens_per_s"], 0)
                self.assertGreater(one["memory_bytes"], 0)
        self.assertTrue(xml.etree.ElementTree.parse(figure).getroot().tag.endswith("svg"))

    def test_defaults(self):
        document = self.bench()
        self.assertEqual([work["name"] for work in document["work"]], ["decode:1x512", "prefill:512"])
        self.assertEqual([one["policy"] for one in document["work"][0]["runs"]], ["dense"])
        self.assertIsNone(document["plan"])

    def test_policies_by_name(self):
        document = self.bench("--work", "decode:1x32", "--policy", "oracle-topk,dense")
        self.assertEqual([one["policy"] for one in document["work"][0]["runs"]], ["oracle-topk", "dense"])

    def test_table(self):
        text = self.ok("bench", "e2e", "--model", TINY, "--device", "cpu", "--work", "prefill:16", "--repetitions", 1).stdout.decode()
        self.assertIn("prefill:16", text)
        self.assertIn("dense", text)

    def test_bad_requests(self):
        self.fails("bench", "e2e", says=["--model", "--shape"])
        self.fails("bench", "e2e", "--model", TINY, "--shape", "llama-3.1-8b", code=2)
        self.fails("bench", "e2e", "--shape", "gpt-4", code=2)
        self.fails("bench", "e2e", "--shape", "llama-3.1-8b", "--device", "cpu", says=["random weights", "GPU"])
        self.fails("bench", "e2e", "--model", TINY, "--device", "cpu", "--work", "decode:1x1K", says=["decode:1x1K", 1024, 512])
        self.fails("bench", "e2e", "--model", TINY, "--device", "cpu", "--work", "sleep:8", says=["--work", "sleep:8"])
        self.fails("bench", "e2e", "--model", TINY, "--device", "cpu", "--policy", "kascade", says=["plan"])
        self.fails("bench", "e2e", "--model", TINY, "--device", "cpu", "--work", "prefill:8", "--figure",
                   self.path("no/where.svg"), says=["where.svg"])


class BenchOperator(CliTest):
    # The reference is held against no limits of the machine, so what else runs there fails no test.
    ARGUMENTS = ["bench", "decode", "--context", 200, "--repetitions", 1, "--kernel", "reference"]

    def test_auto_is_the_gpu_where_there_is_one(self):
        process = run(*self.ARGUMENTS, "--json")
        if process.returncode == 0:
            self.assertEqual(json.loads(process.stdout)["machine"]["device"], "cpu")
        else:
            self.fails("bench", "decode", "--kernel", "reference", says=["a GPU has cuda-sm90"])

    def test_a_plan_counts_the_layers(self):
        document = self.json(*self.ARGUMENTS, "--device", "cpu", "--plan", PLAN)
        self.assertEqual(document["role_counts"], {"layer0": 1, "anchor": 4, "reuse": 27})
        self.assertEqual([document["shape"][key] for key in ("query_heads", "kv_heads", "head_dim")], [32, 8, 128])
        self.assertEqual(document["needed_kv_heads"], 1)
        self.fails("bench", "decode", "--plan", PLAN, "--roles", "1,2,3", code=2)

    def test_what_a_gpu_does_not_take(self):
        if has_cuda():
            self.fails("bench", "decode", "--device", "cuda", "--threads", 2, says=["threads", "--device cpu"])
            self.fails("bench", "decode", "--device", "cuda", "--kernel", "reference", says=["kernel", "cuda-sm90"])
            self.fails("bench", "prefill", "--device", "cuda", "--roles", "0,0,0", says=["roles"])
        else:
            self.fails("bench", "decode", "--device", "cuda", says=["no CUDA"])


def has_cuda():
    """Whether the program is built with CUDA."""
    return b"no CUDA (" not in run("inspect", TINY, "--device", "cuda").stderr


class Devices(CliTest):
    def test_f32_says_that_it_runs_on_the_cpu(self):
        error = self.ok("generate", "--model", TINY, "--prompt", "a", "--max-tokens", 1, "--compute", "f32").stderr.decode()
        self.assertEqual(error.count("runs on the CPU: compute: "), 1 if has_cuda() else 0)


class InspectMemory(CliTest):
    def test_says_what_fits(self):
        arguments = ["inspect", MODEL, "--device", "cuda", "--context", 512, "--batch", 3]
        if not has_cuda():
            self.fails(*arguments, "--memory", "80GB", says=["no CUDA"])
            return
        gpu = self.json(*arguments, "--memory", "80GB")["gpu"]
        self.assertEqual(gpu["available_bytes"] + gpu["reserve_bytes"], 80_000_000_000)
        self.fails("inspect", TINY, "--device", "cuda", "--memory", "80GB", says=["head_dim is 16"])
        self.fails("inspect", MODEL, "--device", "cuda", "--context", 8193, "--memory", "80GB", says=[8193, 8192])
        self.fails("inspect", MODEL, "--device", "cuda", "--compute", "f32", "--memory", "80GB", says=["compute", "f32"])
        self.assertTrue(gpu["fits"])
        self.assertEqual(gpu["total_bytes"], gpu["weight_bytes"] + gpu["kv_bytes"] + gpu["scratch_bytes"])
        process = run(*arguments, "--memory", "1MB")
        self.assertEqual(process.returncode, 1)
        self.assertIn("does not fit: 3 sequences of 512 tokens", process.stderr.decode())
        self.fails(*arguments, "--memory", "much", says=["--memory", "much"])


if __name__ == "__main__":
    cli.main()
