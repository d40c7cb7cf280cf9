# SPDX-License-Identifier: Apache-2.0
"""Runs the program under test. Usage of a test file: python3 FILE_test.py PROGRAM MODEL [unittest arguments]."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import unittest

PROGRAM = sys.argv[1]
MODEL = sys.argv[2]


def run(*arguments, stdin=b"", timeout=300, **kwargs):
    """The finished process; output as bytes."""
    return subprocess.run([PROGRAM, *map(str, arguments)], input=stdin, capture_output=True, timeout=timeout, **kwargs)


class CliTest(unittest.TestCase):
    """A test with a scratch folder of its own."""

    maxDiff = 2000

    def setUp(self):
        self.folder = tempfile.mkdtemp(prefix="kascade-test-")
        self.addCleanup(shutil.rmtree, self.folder, ignore_errors=True)

    def path(self, name):
        return os.path.join(self.folder, name)

    def write(self, name, content):
        with open(self.path(name), "wb") as file:
            file.write(content if isinstance(content, bytes) else content.encode())
        return self.path(name)

    def ok(self, *arguments, **kwargs):
        process = run(*arguments, **kwargs)
        self.assertEqual(process.returncode, 0, process.stderr.decode(errors="replace"))
        return process

    def json(self, *arguments, **kwargs):
        """The JSON document, which must be all of standard output."""
        return json.loads(self.ok(*arguments, "--json", **kwargs).stdout)

    def fails(self, *arguments, code=1, says=(), **kwargs):
        """Fails with one clear line on standard error that holds every word of says; nothing on standard output."""
        process = run(*arguments, **kwargs)
        error = process.stderr.decode(errors="replace")
        # A build with CUDA says first where it runs.
        error = "".join(line for line in error.splitlines(True) if not line.startswith("runs on the "))
        self.assertEqual(process.returncode, code, error)
        self.assertEqual(process.stdout, b"")
        for word in says:
            self.assertIn(str(word), error)
        if code == 1:
            self.assertEqual(len(error.strip().splitlines()), 1, error)
            self.assertTrue(error.startswith("kascade: "), error)
        return error


def main():
    sys.argv[1:3] = []
    unittest.main(verbosity=2)
