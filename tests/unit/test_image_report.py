"""Images in the run folder: small PNGs made from their pixels, once each, in the report and on the page."""

from __future__ import annotations

import base64
import io

from PIL import Image

from slime.core.types import Sample
from slime.data.images import thumbnail
from slime.runlog.sample_log import SampleLog, read_samples, read_thumbnails
from tests.tiny_vision import make_image

BIG = make_image(640, 320)
HOSTILE = make_image()[:-12] + b"<script>alert(1)</script>"  # behind the pixels


def test_thumbnails_are_small_pngs_of_the_pixels_alone():
    for data, size in ((BIG, (160, 80)), (HOSTILE, (32, 16))):
        small = thumbnail(data)
        assert small.startswith(b"\x89PNG") and b"script" not in small
        assert Image.open(io.BytesIO(small)).size == size


def test_a_run_keeps_each_image_of_shown_samples_once(tmp_path):
    log = SampleLog(tmp_path, limit=2, decode=lambda ids: ["x"] * len(ids), thumbnail=thumbnail)
    files = [make_image(seed=n) for n in range(3)]
    for rollout_id in range(2):
        samples = [
            Sample(
                index=n,
                group_index=0,
                tokens=[1, 2],
                response_length=1,
                reward=float(n),
                rollout_log_probs=[-1.0],
                weight_versions=[0],
                multimodal_inputs={"images": [BIG, files[n]]},
            )
            for n in range(3)
        ]
        log.log_scored(rollout_id, samples, [None] * len(samples))
    rows = [row for _, row in read_samples(tmp_path)]
    assert len(rows) == 4
    shown = {key for row in rows for key in row.images}
    assert {path.stem for path in (tmp_path / "images").iterdir()} == shown and len(shown) == 3
    first = read_thumbnails(tmp_path, rows[0].images)
    assert base64.b64decode(first[0].partition(",")[2]) == thumbnail(BIG)
    assert BIG[100:160].hex() not in (tmp_path / "samples.jsonl").read_text()


def test_names_that_are_no_hashes_are_not_read(tmp_path):
    (tmp_path / "images").mkdir()
    (tmp_path / "secret.png").write_bytes(b"key")
    assert read_thumbnails(tmp_path, ["../secret", "x", 7, None]) == []
    assert read_thumbnails(tmp_path, "../secret") == []


def test_files_that_are_no_small_pngs_are_not_passed_on(tmp_path):
    (tmp_path / "images").mkdir()
    png = thumbnail(BIG)
    contents = {"a": b"<svg onload='alert(1)'/>", "b": png + bytes(2**20), "c": png}
    for letter, data in contents.items():
        (tmp_path / "images" / f"{letter * 64}.png").write_bytes(data)
    (found,) = read_thumbnails(tmp_path, [letter * 64 for letter in contents])
    assert base64.b64decode(found.partition(",")[2]) == png
