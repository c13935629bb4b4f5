"""The log of a process holds everything it said, whoever said it, to its end; secrets stay out."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

PROGRAM = """
import faulthandler, logging, os, sys, warnings
from slime.runlog.logging import open_process_log

open_process_log(sys.argv[1], "trainer_0", ["MINE", "MY_API_KEY", "UNSET"])
logging.getLogger("slime.x").info("a record")
print("printed")
os.system("echo from a library")
os.write(2, b"past Python\\n")
warnings.warn("a warning")
faulthandler._sigsegv()
"""
ENV = {
    "MINE": "http://me:sesame@host/x",
    "MY_API_KEY": "sesame",
    "NCCL_IB_TC": "160",
    "HIDDEN": "sesame",
}


def test_everything_is_in_the_file_even_when_the_process_crashes(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path)],
        cwd=ROOT,
        env={"PATH": "/usr/bin:/bin", **ENV},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == -11 and done.stdout == done.stderr == ""
    text = (tmp_path / "logs" / "trainer_0.log").read_text()
    said = ["a record", "printed", "from a library", "past Python", "a warning"]
    said += ["Fatal Python error: Segmentation fault", '"<string>"']
    places = [text.find(word) for word in said]
    assert -1 not in places and places == sorted(places), text
    first = text.splitlines()[0]
    assert "trainer_0 on" in first and first.endswith(
        "MINE=http://***@host/x MY_API_KEY=*** NCCL_IB_TC=160"
    )
    assert "sesame" not in text


def test_requests_of_an_agents_client_are_not_logged(tmp_path):
    """A line for each request of openai's client, whatever HTTP library it uses, would bury all others."""
    program = """
import http.server, logging, sys, threading
import openai
from slime.runlog.logging import open_process_log

class Refuse(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        self.send_error(400)
    def log_message(self, *args):
        pass

server = http.server.HTTPServer(("127.0.0.1", 0), Refuse)
threading.Thread(target=server.serve_forever, daemon=True).start()
open_process_log(sys.argv[1], "rollout")
client = openai.OpenAI(base_url=f"http://127.0.0.1:{server.server_port}/v1", api_key="none", max_retries=0)
try:
    client.chat.completions.create(model="x", messages=[{"role": "user", "content": "x"}])
except openai.BadRequestError:
    logging.getLogger("slime.x").info("refused")
"""
    command = [sys.executable, "-c", program, str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=60)
    text = (tmp_path / "logs" / "rollout.log").read_text()
    assert "refused" in text and "HTTP Request" not in text
