# SPDX-License-Identifier: Apache-2.0
"""bench e2e and inspect --device cuda on a tiny model: documents, figure, exit codes, errors."""

import os
import xml.etree.ElementTree

import cli
from cli import CliTest, run

TINY = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "fixtures", "models", "llama.gguf")


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


class InspectMemory(CliTest):
    def test_says_what_fits(self):
        arguments = ["inspect", TINY, "--device", "cuda", "--context", 512, "--batch", 3]
        process = run(*arguments, "--memory", "80GB", "--json")
        if process.returncode != 0:  # a build without CUDA says so
            self.fails(*arguments, says=["no CUDA"])
            return
        gpu = self.json(*arguments, "--memory", "80GB")["gpu"]
        self.assertTrue(gpu["fits"])
        self.assertEqual(gpu["total_bytes"], gpu["weight_bytes"] + gpu["kv_bytes"] + gpu["scratch_bytes"])
        process = run(*arguments, "--memory", "1MB")
        self.assertEqual(process.returncode, 1)
        self.assertIn("does not fit: 3 sequences of 512 tokens", process.stderr.decode())
        self.fails(*arguments, "--memory", "much", says=["--memory", "much"])


if __name__ == "__main__":
    cli.main()
