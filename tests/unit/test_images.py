"""Images of prompts against transformers' processor and positions, and hostile ones."""

from __future__ import annotations

import base64
import io
import os
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoConfig, AutoImageProcessor, AutoModelForImageTextToText

from slime.core.errors import ConfigError, UserError
from slime.data.images import ImageProcessor, load_image_processor, open_image, read_image
from slime.data.tokenizer import load_tokenizer
from tests.tiny import make_tiny_checkpoint
from tests.tiny_vision import IMAGE, PLACE, make_image, make_vision_checkpoint

SIZES = [(32, 16), (16, 40), (8, 8), (100, 30)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_vision_checkpoint(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def processor(model) -> ImageProcessor:
    return load_image_processor(model)


def encode(model: str, processor: ImageProcessor, text: str, images: list[bytes]) -> list[int]:
    return processor.expand(load_tokenizer(model).encode(text, add_special_tokens=False), images)


# ---- tokens, pixels and positions


@pytest.mark.parametrize("size", SIZES)
def test_pixels_are_those_of_transformers(model, processor, size):
    data = make_image(*size)
    theirs = AutoImageProcessor.from_pretrained(model, backend="pil")(
        images=[Image.open(io.BytesIO(data))], return_tensors="np"
    )
    ours = processor.pixels(data)
    np.testing.assert_array_equal(ours.values, theirs["pixel_values"])
    assert list(ours.grid) == theirs["image_grid_thw"][0].tolist()


@pytest.mark.parametrize("sizes", [[], SIZES[:1], SIZES, [SIZES[1]] * 3])
def test_positions_are_those_of_transformers(model, processor, sizes):
    images = [make_image(*size, seed=n) for n, size in enumerate(sizes)]
    tokens = encode(model, processor, "a" + "bc".join([PLACE] * len(images)) + "defg", images)
    grids = [processor.pixels(data).grid for data in images]
    assert tokens.count(IMAGE) == sum(processor.num_tokens(grid) for grid in grids)
    with torch.device("meta"):
        hf = AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(model))
    ids = torch.tensor([tokens])
    expected, _ = hf.model.get_rope_index(
        ids,
        mm_token_type_ids=(ids == IMAGE).int(),
        image_grid_thw=torch.tensor(grids) if grids else None,
    )
    np.testing.assert_array_equal(processor.positions(tokens, grids), expected[:, 0].T)


def test_images_and_places_must_be_as_many(model, processor):
    with pytest.raises(UserError, match="1 image placeholders and 2 images"):
        encode(model, processor, f"a{PLACE}", [make_image(), make_image()])
    with pytest.raises(UserError, match="2 image placeholders and 1 images"):
        encode(model, processor, f"{PLACE} what is <|image_pad|>?", [make_image()])


def test_a_text_model_takes_no_images(tmp_path):
    with pytest.raises(ConfigError, match="a qwen3 model takes no images"):
        load_image_processor(str(make_tiny_checkpoint(tmp_path)))


# ---- reading


def test_all_ways_to_give_an_image(tmp_path):
    data = make_image()
    (tmp_path / "a.png").write_bytes(data)
    uri = "data:image/png;base64," + base64.b64encode(data).decode()
    sources = ["a.png", str(tmp_path / "a.png"), uri, data, {"bytes": data, "path": "b.png"}]
    sources.append({"bytes": None, "path": "a.png"})
    assert all(read_image(source, tmp_path) == data for source in sources)


def test_a_turned_image_is_stored_upright(tmp_path):
    file = io.BytesIO()
    exif = Image.Exif()
    exif[0x0112] = 6  # turn right by 90 degrees to see it upright
    Image.new("RGB", (32, 16)).save(file, "JPEG", exif=exif)
    assert open_image(read_image(file.getvalue(), tmp_path)).size == (16, 32)


def test_a_turned_photo_stays_within_the_limit(tmp_path):
    noise = np.random.default_rng(0).integers(0, 256, (3400, 3400, 3), np.uint8)  # 33 MiB as a PNG
    exif, file = Image.Exif(), io.BytesIO()
    exif[0x0112] = 6
    Image.fromarray(noise).save(file, "JPEG", quality=50, exif=exif)
    turned = open_image(read_image(file.getvalue(), tmp_path))
    assert turned.size == (3400, 3400) and turned.getexif().get(0x0112, 1) == 1


def png_of_size(width: int, height: int) -> bytes:
    """A PNG whose header promises a size that its data do not hold."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return (
            struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
        )

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0" * 99))


def animation() -> bytes:
    file = io.BytesIO()
    frames = [Image.new("RGB", (8, 8), (i, 0, 0)) for i in range(3)]
    frames[0].save(file, "PNG", save_all=True, append_images=frames[1:])
    return file.getvalue()


def eps() -> bytes:
    return b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (png_of_size(9_000, 9_000), "9000 x 9000 pixels"),
        (png_of_size(200_000, 200_000), "40000000000 pixels"),
        (png_of_size(64, 64), "cannot be decoded"),
        (make_image()[:60], "cannot be decoded"),
        (b"", "cannot be decoded"),
        (eps(), "cannot be decoded"),
        (animation(), "several frames"),
        (b"\x89PNG" + bytes(33 << 20), "the limit is 32 MiB"),
        ("https://example.org/a.png", "not downloaded"),
        ("file:///etc/passwd", "not downloaded"),
        ("data:text/html,<script>", "begins data:image/png;base64"),
        ("data:image/png;base64,####", "base64 is broken"),
        ("data:image/png;base64,\u00e9", "base64 is broken"),
        ("missing.png", "cannot be read: No such file"),
        ("a\0b.png", "embedded null byte"),
        ("~nobody-of-this-name/a.png", "cannot be read"),
        ("/dev/zero", "is not below"),
        (".", "is not a regular file"),
        (7, "given as int"),
        ({}, "given as NoneType"),
    ],
    ids=lambda value: str(value)[:24],
)
def test_what_is_no_image_is_refused_in_one_sentence(tmp_path, source, message):
    with pytest.raises(UserError, match=message):
        read_image(source, tmp_path)


def test_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe.png")
    (tmp_path / "link.png").symlink_to("pipe.png")
    for name in ("pipe.png", "link.png"):
        with pytest.raises(UserError, match="not a regular file"):
            read_image(name, tmp_path)


def test_a_large_file_is_not_read(tmp_path):
    with (tmp_path / "big.png").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(UserError, match="over 32 MiB"):
        read_image("big.png", tmp_path)


def test_a_strip_is_refused_by_the_processor(processor):
    with pytest.raises(UserError, match="aspect ratio"):
        processor.pixels(make_image(2000, 4))


def make_scans(count: int) -> bytes:
    """A progressive JPEG whose last scan, of a hundred bytes, is repeated."""
    file = io.BytesIO()
    Image.new("L", (2000, 2000), 128).save(file, "JPEG", progressive=True)
    data = file.getvalue()[:-2]
    return data + data[data.rindex(b"\xff\xda") :] * count + b"\xff\xd9"


def test_a_jpeg_of_many_scans_is_refused_at_once():
    """Each scan goes over all pixels: a megabyte of them would be decoded for half an hour."""
    open_image(make_scans(2))
    with pytest.raises(UserError, match="over 32 scans"):
        open_image(make_scans(40))


def make_chunks(kind: bytes, content: bytes, count: int = 1) -> bytes:
    file = io.BytesIO()
    Image.new("L", (1, 1)).save(file, "PNG")
    data = file.getvalue()
    crc = zlib.crc32(kind + content)
    chunk = struct.pack(">I", len(content)) + kind + content + struct.pack(">I", crc)
    return data[:33] + chunk * count + data[33:]  # behind the header


def test_a_png_of_a_million_chunks_is_refused_at_once():
    with pytest.raises(UserError, match="over 32768 scans"):
        open_image(make_chunks(b"tEXt", b"a\0b", 1_000_000))


@pytest.mark.parametrize(
    "exif", [b"garbage", b"MM\0*\0\0\0\x08\xff\xff", b"II*\0\xff\xff\xff\xff", b"Exif\0\0MM"]
)
def test_broken_exif_is_no_reason_to_end_a_run(tmp_path, exif):
    data = make_chunks(b"eXIf", exif)
    assert read_image(data, tmp_path) == data


@pytest.mark.parametrize(
    "path",
    [
        "/dev/zero",
        "/proc/self/mem",
        "../private.png",
        "a/../../private.png",
        "~/x.png",
        "pipe",
        "a\0b",
    ],
)
def test_a_row_names_no_files_elsewhere_and_no_devices(tmp_path, path):
    (tmp_path / "private.png").write_bytes(make_image(8, 8))
    folder = tmp_path / "data"
    folder.mkdir()
    os.mkfifo(folder / "pipe")
    with pytest.raises(UserError, match=r"is not below|cannot be read"):
        read_image(path, folder)
    with pytest.raises(UserError, match=r"is not below|cannot be read"):
        read_image(path, folder, str(tmp_path / "images"))


def test_a_row_names_files_of_the_allowed_folder(tmp_path):
    image, folder = make_image(8, 8), tmp_path / "data"
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "a.png").write_bytes(image)
    name = str(tmp_path / "images" / "a.png")
    with pytest.raises(UserError, match=f"--allowed-local-media-path {tmp_path}/images"):
        read_image(name, folder)
    for path in (name, "../images/a.png"):
        assert read_image(path, folder, str(tmp_path / "images")) == image
        assert read_image(path, folder, "/") == image


@pytest.mark.parametrize("allowed", [None, "pictures"])
def test_a_relative_data_folder_bounds_what_its_rows_name(tmp_path, monkeypatch, allowed):
    """`--prompt-data train.jsonl` lies in ".", below which no path with .. is."""
    image = make_image(8, 8)
    for name in ("private.png", "run/a.png", "run/pictures/b.png"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(image)
    monkeypatch.chdir(tmp_path / "run")
    for path in ("../private.png", str(tmp_path / "private.png"), "pictures/../../private.png"):
        with pytest.raises(UserError, match="is not below"):
            read_image(path, Path(), allowed)
    for path in ("a.png", "pictures/b.png", str(tmp_path / "run" / "a.png")):
        assert read_image(path, Path(), allowed) == image
