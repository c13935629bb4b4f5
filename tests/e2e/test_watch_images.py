"""Images in the conversation view of `slime watch`, in a real browser."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from PIL import Image

from slime.core.types import Sample
from slime.data.images import thumbnail
from slime.runlog.sample_log import SampleLog, read_samples
from tests.browser import Watcher, browser, require_browser, served
from tests.synthetic_run import write_run
from tests.tiny_vision import make_image

RED, BLUE = (200, 30, 30), (30, 30, 200)
ATTACK = '<img src=x onerror="window.pwned=1"><script>window.pwned=1</script>'


@pytest.fixture(scope="module")
def watcher(tmp_path_factory):
    require_browser()
    folder = tmp_path_factory.mktemp("runs")
    _write_pictures(folder / "pictures")
    profile = tmp_path_factory.mktemp("browser")
    with browser(profile) as context, served(folder) as server:
        found = Watcher(context, server.url)
        yield found
        found.check()
        found.close()


def _write_pictures(run_dir: Path) -> None:
    """A run whose sample 0 has two images, one with a script behind its pixels; those of sample 1 are forged."""
    write_run(run_dir, rollouts=1, planned=1)
    halves = Image.new("RGB", (640, 320), RED)
    halves.paste(BLUE, (320, 0, 640, 320))
    file = io.BytesIO()
    halves.save(file, "PNG")
    files = [[file.getvalue(), make_image(64, 32) + ATTACK.encode()], [make_image(seed=1)]]
    samples = [
        Sample(
            index=n,
            group_index=0,
            prompt=f"What is in image {n}?",
            response="red, blue",
            tokens=[1, 2],
            response_length=1,
            reward=float(n),
            rollout_log_probs=[-1.0],
            weight_versions=[0],
            multimodal_inputs={"images": images},
        )
        for n, images in enumerate(files)
    ]
    log = SampleLog(run_dir, limit=2, decode=lambda ids: ["x"] * len(ids), thumbnail=thumbnail)
    log.log_scored(1, samples, [None, None])
    (forged,) = [row.images[0] for n, row in read_samples(run_dir) if (n, row.index) == (1, 1)]
    (run_dir / "images" / f"{forged}.png").write_text(
        f"<svg onload='window.pwned=1'>{ATTACK}</svg>"
    )


_PIXEL = """(image, [x, y]) => {
    const canvas = document.createElement("canvas");
    canvas.width = image.naturalWidth; canvas.height = image.naturalHeight;
    const context = canvas.getContext("2d");
    context.drawImage(image, 0, 0);
    return [...context.getImageData(x, y, 1, 1).data].slice(0, 3);
}"""


def test_the_conversation_shows_the_images_of_a_sample(watcher):
    """A thumbnail is 160 pixels wide, or as wide as the image; one with a script behind its pixels is only pixels."""
    watcher.open("sample", run="pictures", dataset="train", rollout_id=1, index=0)
    images = watcher.page.locator("#conversation img")
    images.first.wait_for()
    size = "images => images.map(image => [image.naturalWidth, image.naturalHeight])"
    assert images.evaluate_all(size) == [[160, 80], [64, 32]]
    assert images.first.evaluate(_PIXEL, [40, 40]) == list(RED)
    assert images.first.evaluate(_PIXEL, [120, 40]) == list(BLUE)
    assert images.first.bounding_box()["width"] >= 100  # large enough to look at
    assert "What is in image 0?" in watcher.text("#conversation")
    assert watcher.page.evaluate("() => window.pwned === undefined")


def test_forged_images_are_not_shown(watcher):
    watcher.open("sample", run="pictures", dataset="train", rollout_id=1, index=1)
    watcher.page.wait_for_selector("#conversation")
    assert "What is in image 1?" in watcher.text("#conversation")
    assert watcher.page.locator("main img").count() == 0
    assert watcher.page.evaluate("() => window.pwned === undefined")
