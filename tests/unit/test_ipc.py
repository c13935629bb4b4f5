import fcntl
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from slime.weights import ipc
from slime.weights.ipc import (
    ImportedBuffers,
    SharedBuffer,
    collect_exports,
    import_buffer,
    release_export,
    remove_stale_segments,
)
from tests.other_user import NOBODY, as_user, needs_root

PATTERN = torch.arange(1000, dtype=torch.int64).to(torch.uint8)


def segment_names() -> set[str]:
    return {path.name for path in ipc.SHM_DIR.glob("slime_*")}


@pytest.fixture
def buffer():
    buffer = SharedBuffer(1000)
    yield buffer
    buffer.close()


def test_another_process_reads_what_was_written(buffer):
    buffer.tensor.copy_(PATTERN)
    program = (
        "import json, sys\n"
        "from slime.weights.ipc import import_buffer\n"
        "with import_buffer(json.loads(sys.argv[1])) as tensor:\n"
        "    print(json.dumps(tensor.tolist()))\n"
    )
    handle = json.dumps(buffer.export())
    out = subprocess.check_output([sys.executable, "-c", program, handle], text=True)
    assert json.loads(out) == PATTERN.tolist()
    # An importer that exits must not take the segment along.
    with import_buffer(buffer.export()) as tensor:
        assert torch.equal(tensor, PATTERN)


def test_a_receiver_cannot_alter_the_segment(buffer):
    buffer.tensor.copy_(PATTERN)
    with import_buffer(buffer.export()) as tensor:
        tensor.zero_()
    assert torch.equal(buffer.tensor, PATTERN)


def test_views_kept_beyond_the_with_block_stay_readable(buffer):
    buffer.tensor.copy_(PATTERN)
    with import_buffer(buffer.export()) as tensor:
        kept = tensor[10:20]
    del tensor
    assert torch.equal(kept, PATTERN[10:20])


def test_close_unlinks():
    buffer = SharedBuffer(64)
    name = buffer.export()["name"].lstrip("/")
    assert name in segment_names()
    buffer.close()
    assert name not in segment_names()


def test_segments_are_private_to_the_user(buffer):
    mode = (ipc.SHM_DIR / buffer.export()["name"].lstrip("/")).stat().st_mode
    assert mode & 0o077 == 0


def test_stale_segments_go_and_live_ones_stay(buffer):
    program = "import os\nfrom slime.weights.ipc import SharedBuffer\nb = SharedBuffer(64)\nprint(b.export()['name'], flush=True)\nos._exit(9)"
    dead = subprocess.run([sys.executable, "-c", program], text=True, capture_output=True)
    dead_name = dead.stdout.strip().lstrip("/")
    live_name = buffer.export()["name"].lstrip("/")
    assert dead_name in segment_names()
    for name in (dead_name, live_name):
        os.utime(ipc.SHM_DIR / name, (time.time() - 3600,) * 2)
    removed = remove_stale_segments()
    assert dead_name in removed and dead_name not in segment_names()
    assert live_name not in removed and live_name in segment_names()


@needs_root
def test_segments_of_other_users_are_left_alone():
    """One that everybody may open, old enough to be removed, in a folder where only its owner may."""
    path = ipc.SHM_DIR / f"slime_{os.getpid()}_others"
    as_user(NOBODY, _make_old_segment, str(path))
    try:
        for victim in (NOBODY - 1, os.getuid()):
            assert path.name not in as_user(victim, remove_stale_segments)
            assert path.exists()
        assert path.name in as_user(NOBODY, remove_stale_segments)
    finally:
        path.unlink(missing_ok=True)


def _make_old_segment(path: str) -> None:
    os.close(os.open(path, os.O_CREAT | os.O_EXCL, 0o666))
    os.chmod(path, 0o666)
    os.utime(path, (time.time() - 3600,) * 2)


def test_a_segment_being_made_is_not_stale():
    path = ipc.SHM_DIR / f"slime_{os.getpid()}_new"
    path.touch()
    try:
        assert path.name not in remove_stale_segments()
        with path.open() as file:  # nothing kept the lock either
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        path.unlink()


@pytest.mark.parametrize("name", ["/../etc/passwd", "/other", "slime_x", "/slime_a/b", "/slime_.."])
def test_only_names_of_our_segments_are_opened(name):
    with (
        pytest.raises(ValueError, match="not the name"),
        import_buffer({"kind": "shm", "name": name, "size": 1}),
    ):
        pass


def test_a_handle_larger_than_its_segment_is_refused(buffer):
    with (
        pytest.raises(ValueError, match="1000 bytes"),
        import_buffer({**buffer.export(), "size": 1001}),
    ):
        pass


def test_a_full_shm_is_an_error_and_leaves_nothing_behind():
    mine = f"slime_{os.getpid()}_"  # other processes of this machine may have theirs
    before = {name for name in segment_names() if name.startswith(mine)}
    with pytest.raises(OSError):
        SharedBuffer(1 << 60)
    assert {name for name in segment_names() if name.startswith(mine)} == before


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_cuda_buffer_between_processes():
    buffer = SharedBuffer(1000, "cuda")
    buffer.tensor.copy_(PATTERN)
    program = (
        "import json, sys\n"
        "from slime.weights.ipc import import_buffer\n"
        "for line in sys.stdin:\n"
        "    with import_buffer(json.loads(line)) as tensor:\n"
        "        print(json.dumps(tensor.tolist()), flush=True)\n"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    for factor in (1, 2, 3):  # the same memory, exported anew each time
        buffer.tensor.copy_(PATTERN * factor)
        child.stdin.write(json.dumps(buffer.export()) + "\n")
        child.stdin.flush()
        assert json.loads(child.stdout.readline()) == (PATTERN * factor).tolist()
    child.stdin.close()
    assert child.wait(60) == 0
    buffer.close()


def test_an_open_buffer_shows_what_is_written_later(buffer):
    """A mapping is private, but Linux copies a page only for who writes to it."""
    imported = ImportedBuffers()
    for factor in (1, 2, 3):
        buffer.tensor.copy_(PATTERN * factor)
        assert torch.equal(imported.get(buffer.export()), PATTERN * factor)
    imported.close()


def test_the_two_buffers_used_last_stay_open_and_are_opened_once():
    buffers = [SharedBuffer(64) for _ in range(3)]
    handles = [buffer.export() for buffer in buffers]
    imported = ImportedBuffers()
    first, second = (imported.get(handle) for handle in handles[:2])
    assert imported.get(handles[0]) is first
    for buffer in buffers[:2]:  # what is open needs no name any more
        (ipc.SHM_DIR / buffer.export()["name"].lstrip("/")).unlink()
    assert imported.get(handles[1]) is second and imported.get(handles[0]) is first
    imported.get(handles[2])
    assert imported.get(handles[0]) is first
    with pytest.raises(FileNotFoundError):  # the one of the three that was not used for longest
        imported.get(handles[1])
    imported.close()
    with pytest.raises(FileNotFoundError):
        imported.get(handles[0])
    for buffer in buffers:
        buffer.close()


def test_a_closed_buffer_is_mapped_no_more(buffer):
    imported = ImportedBuffers()
    imported.get(buffer.export())
    name = buffer.export()["name"].lstrip("/")
    assert name in Path("/proc/self/maps").read_text()
    before = Path("/proc/self/maps").read_text().count(name)
    imported.close()
    assert Path("/proc/self/maps").read_text().count(name) == before - 1


_READER = """
import json, sys
from slime.weights.ipc import ImportedBuffers, finish_reading
imported = ImportedBuffers()
for line in sys.stdin:
    if line == "close\\n":
        imported.close()
        print("closed", flush=True)
        continue
    tensor = imported.get(json.loads(line))
    values = tensor[:1000].tolist()
    finish_reading(tensor)
    del tensor
    print(json.dumps(values), flush=True)
"""


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("ending", ["closed", "killed"])
def test_a_cuda_buffer_exported_once_is_filled_often_and_given_back(ending):
    torch.cuda.init()
    before = torch.cuda.memory_allocated()
    buffer = SharedBuffer(64 << 20, "cuda")
    child = subprocess.Popen(
        [sys.executable, "-c", _READER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    handle = buffer.export()

    def ask(line: str) -> str:
        child.stdin.write(line + "\n")
        child.stdin.flush()
        return child.stdout.readline()

    for factor in (1, 2, 3):
        buffer.tensor[:1000].copy_(PATTERN * factor)
        torch.cuda.synchronize()
        assert json.loads(ask(json.dumps(handle))) == (PATTERN * factor).tolist()
    if ending == "closed":
        assert ask("close") == "closed\n"
    else:
        child.kill()
        child.wait()
        release_export(handle)
    buffer.close()
    collect_exports()
    assert torch.cuda.memory_allocated() == before
    child.kill()
    child.wait()
