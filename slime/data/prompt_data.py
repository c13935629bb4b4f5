"""Read prompt files into Samples: jsonl and parquet rows, chat templates, length filter.

A dataset is written `path`, `path@[0:100]` (a slice of its rows), `path:weight=2` (its rows occur
twice per epoch), or `reasoning-gym:<task>`. Errors name the file, the line and the flag to change.
"""

from __future__ import annotations

import itertools
import json
import logging
import re
from codecs import BOM_UTF8
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from slime.config.datasets import DataSpec
from slime.config.reward_types import check_row_type
from slime.core.errors import ConfigError, UserError
from slime.core.types import Sample, as_messages
from slime.data.images import has_images, load_image_processor, read_image, take_images
from slime.data.tokenizer import encode_prompt
from slime.utils.reasoning_tasks import chosen_rows, task_rows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

_TOKENIZE_CHUNK = 1024
_Row = tuple[str, dict[str, Any]]  # location for messages, and its keys


@dataclass(kw_only=True, frozen=True)
class DataFormat:
    """The keys of a row, and how a prompt is tokenized."""

    input_key: str = "input"
    label_key: str | None = None
    metadata_key: str = "metadata"
    tool_key: str = "tools"
    image_key: str | None = None  # --multimodal-keys; None: rows have no images
    max_images: int | None = None  # of a row
    media_path: str | None = None  # images may also be below this folder
    checkpoint: str = ""  # whose processor turns images into tokens
    apply_chat_template: bool = False
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    max_prompt_len: int | None = None
    max_prompt_flag: str = "--rollout-max-prompt-len"
    label_needed_by: str | None = None  # e.g. "--rm-type math": rows without a label are refused
    row_rm_types: tuple[str, ...] | None = None  # allowed in metadata["rm_type"]; None: any
    data_flag: str = "--prompt-data"
    input_flag: str = "--input-key"
    label_flag: str = "--label-key"


class PromptDataset:
    """Rows as Samples without a response. A prompt is tokenized on first use, and the tokens are cached."""

    def __init__(
        self,
        samples: list[Sample],
        tokenizer: PreTrainedTokenizerBase | None,
        data_format: DataFormat,
        weight: float,
        folder: Path,  # image paths are relative to it
    ) -> None:
        self.samples = samples
        self._image_folders = folder, data_format.media_path
        self._last_images: tuple[int, list[bytes]] = (-1, [])  # a row and its images
        self.weight = weight
        self._tokenizer = tokenizer
        self._format = data_format

    def __len__(self) -> int:
        return len(self.samples)

    def make_sample(self, row: int) -> Sample:
        """Return a new Sample of the row, which shares no lists or dictionaries with others.

        Samples made one after another share the bytes of the row's images.
        """
        template = self.samples[row]
        if template.image_files and self._last_images[0] != row:
            files = [read_image(file, *self._image_folders) for file in template.image_files]
            self._last_images = (row, files)
        images = self._last_images[1] if template.image_files else []
        if not template.tokens and isinstance(template.prompt, str) and self._tokenizer is not None:
            template.tokens = encode_prompt(
                self._tokenizer, template.prompt, rendered=self._format.apply_chat_template
            )
            if not template.tokens:
                raise ConfigError(
                    f"{self._format.data_flag}: the prompt of row {row + 1} has no tokens"
                )
            if images:
                processor = load_image_processor(self._format.checkpoint)
                template.tokens = processor.expand(template.tokens, images)
        sample = template.clone()
        if images:
            sample.multimodal_inputs = {"images": list(images)}
        return sample


def load_prompts(
    text: str, data_format: DataFormat, tokenizer: PreTrainedTokenizerBase | None
) -> PromptDataset:
    """Read, convert and filter one dataset."""
    spec = DataSpec.parse(text, data_format.data_flag)
    data_format = _for_rows_of(spec, data_format)
    samples = [
        _to_sample(row, where, data_format, tokenizer)
        for where, row in _rows_of(spec, text, data_format)
    ]
    kept = samples
    if data_format.max_prompt_len is not None:
        kept = _filter_by_length(samples, data_format, tokenizer, _folder(spec))
        if not kept:
            raise ConfigError(
                f"{data_format.data_flag} {text}: all {len(samples)} prompts are longer than "
                f"{data_format.max_prompt_flag} {data_format.max_prompt_len}; raise it"
            )
    if len(kept) < len(samples):
        logger.info(
            "%s: removed %d of %d prompts that are longer than %d tokens",
            text, len(samples) - len(kept), len(samples), data_format.max_prompt_len,
        )  # fmt: skip
    return PromptDataset(kept, tokenizer, data_format, spec.weight, _folder(spec))


def check_prompts(
    text: str, data_format: DataFormat, refuse: Callable[[Sample], str | None] = lambda sample: None
) -> int:
    """Return the number of rows; raise ConfigError for the first that is invalid or that `refuse` complains about."""
    spec = DataSpec.parse(text, data_format.data_flag)
    plain = replace(_for_rows_of(spec, data_format), apply_chat_template=False)
    rows = _rows_of(spec, text, data_format)
    for where, row in rows:
        sample = _to_sample(row, where, plain, None)
        try:
            for source in sample.image_files:
                read_image(source, _folder(spec), data_format.media_path)
        except UserError as error:
            raise ConfigError(f"{where}: {error}") from None
        if complaint := refuse(sample):
            raise ConfigError(f"{where}: {complaint}")
    return len(rows)


def _folder(spec: DataSpec) -> Path:
    return Path(spec.path).expanduser().parent if spec.task is None else Path()


def _rows_of(spec: DataSpec, text: str, data_format: DataFormat) -> list[_Row]:
    if spec.task is not None:
        rows = _task_rows(spec.task, spec.rows, data_format)
    else:
        rows = _take_slice(read_rows(spec.path, data_format.data_flag), spec.rows)
    if not rows:
        raise ConfigError(f"{data_format.data_flag} {text}: the dataset is empty")
    return rows


def _for_rows_of(spec: DataSpec, data_format: DataFormat) -> DataFormat:
    """Let rows that slime generates itself choose their own reward type."""
    return data_format if spec.task is None else replace(data_format, row_rm_types=None)


def _task_rows(task: str, part: slice, data_format: DataFormat) -> list[_Row]:
    """Return rows of a task under the keys of the format."""
    label_key = data_format.label_key or "label"
    keys = (data_format.input_key, label_key, data_format.metadata_key)
    rows = task_rows(task, chosen_rows(part), data_format.data_flag)
    return [
        (f"reasoning-gym:{task}, row {number}", dict(zip(keys, row, strict=True)))
        for number, row in enumerate(rows, start=part.start or 0)
    ]


def read_rows(path: str, flag: str = "--prompt-data") -> Iterator[_Row]:
    """Yield the rows of a file, each with its location ("data.jsonl:17")."""
    file = Path(path).expanduser()
    if not file.exists():
        raise ConfigError(f"{flag}: {path} does not exist{_hub_hint(path)}")
    if file.is_dir():
        raise ConfigError(f"{flag}: {path} is a folder; give a .jsonl or .parquet file")
    if file.suffix == ".parquet":
        yield from _read_parquet(file, flag)
    elif file.suffix in (".jsonl", ".json"):
        yield from _read_jsonl(file)
    else:
        raise ConfigError(f"{flag}: {path}: expected .jsonl or .parquet, not {file.suffix!r}")


def _hub_hint(path: str) -> str:
    """Return what to type if `path` looks like a data set of the Hub, else nothing."""
    if path.count("/") != 1 or path.startswith(("/", ".", "~")) or Path(path).suffix:
        return ""
    return (
        ": if it is a data set of the Hugging Face Hub, run "
        f"`hf download {path} --repo-type dataset --local-dir {path}` and give one of its files"
    )


def _take_slice(rows: Iterator[_Row], part: slice) -> list[_Row]:
    """Return a slice of the rows; stop reading at its end where that is possible."""
    if (part.start or 0) >= 0 and part.stop is not None and part.stop >= 0:
        return list(itertools.islice(rows, part.start, part.stop))
    return list(rows)[part]


def _read_jsonl(file: Path) -> Iterator[_Row]:
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            where = f"{file}:{number}"
            try:
                line = line.removeprefix(BOM_UTF8) if number == 1 else line
                row = orjson.loads(line)
                if re.search(rb"\d{19}", line):  # orjson reads integers above 64 bits as floats
                    row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise ConfigError(
                    f"{where}: not valid JSON: {error}; each line must be one JSON object, in UTF-8"
                ) from None
            if not isinstance(row, dict):
                raise ConfigError(
                    f"{where}: a JSON {type(row).__name__}; each line must be one JSON object"
                )
            yield where, row


def _read_parquet(file: Path, flag: str) -> Iterator[_Row]:
    try:
        import pyarrow.parquet as parquet
        from pyarrow import ArrowException
    except ImportError:
        raise ConfigError(f"{flag}: {file} needs pyarrow: pip install 'slime[parquet]'") from None
    number = 0
    try:
        for batch in parquet.ParquetFile(file).iter_batches():
            for row in batch.to_pylist():
                number += 1
                yield f"{file}, row {number}", row
    except ArrowException as error:
        raise ConfigError(f"{flag}: {file} is not a readable parquet file: {error}") from None


def _to_sample(
    row: dict[str, Any],
    where: str,
    data_format: DataFormat,
    tokenizer: PreTrainedTokenizerBase | None,
) -> Sample:
    prompt = _take(row, data_format.input_key, where, data_format.input_flag)
    if not isinstance(prompt, (str, list)) or not prompt:
        raise ConfigError(
            f"{where}: {data_format.input_key!r} is {_describe(prompt)}; expected a text or a list of "
            f"messages ({data_format.input_flag} names the key)"
        )
    label = None
    if data_format.label_key is not None:
        label = _take(row, data_format.label_key, where, data_format.label_flag)
    if label in (None, "") and data_format.label_needed_by is not None:
        raise ConfigError(f"{where}: {_missing_label(row, data_format)}")
    metadata = _metadata(row, where, data_format)
    if data_format.row_rm_types is not None:
        check_row_type(metadata.get("rm_type"), data_format.row_rm_types, where)
    prompt, images = _take_images(prompt, row, where, data_format)
    messages = as_messages(prompt)
    if data_format.apply_chat_template:
        prompt = _render(messages, metadata.get("tools"), where, data_format, tokenizer)
    inputs = {"images": images} if images else None
    given = {"messages": messages, "label": label, "metadata": metadata}
    return Sample(prompt=prompt, multimodal_inputs=inputs, **given)


def _take_images(
    prompt: str | list[dict[str, Any]], row: dict[str, Any], where: str, data_format: DataFormat
) -> tuple[str | list[dict[str, Any]], list[Any]]:
    """Return the prompt and the images of a row, which are read when it is used."""
    if data_format.image_key is None:
        if has_images(prompt):
            raise ConfigError(
                f'{where}: the messages hold images: add --multimodal-keys \'{{"image": "images"}}\''
            )
        return prompt, []
    try:
        prompt, images = take_images(prompt, row.get(data_format.image_key))
    except UserError as error:
        raise ConfigError(f"{where}: {error}") from None
    if data_format.max_images is not None and len(images) > data_format.max_images:
        raise ConfigError(
            f"{where}: {len(images)} images; --limit-mm-data-per-request allows {data_format.max_images}"
        )
    return prompt, images


def _take(row: dict[str, Any], key: str, where: str, flag: str) -> Any:
    if key not in row:
        raise ConfigError(
            f"{where}: no key {key!r}; the keys are {', '.join(row) or 'none'}: "
            f"choose one with {flag}"
        )
    return row[key]


def _missing_label(row: dict[str, Any], data_format: DataFormat) -> str:
    if data_format.label_key is None:
        return (
            f"{data_format.label_needed_by} compares with a label; name its key with "
            f"{data_format.label_flag} (its keys: {', '.join(row)})"
        )
    return f"{data_format.label_key!r} is empty, and {data_format.label_needed_by} compares with it"


def _metadata(row: dict[str, Any], where: str, data_format: DataFormat) -> dict[str, Any]:
    metadata = _unpacked(row.get(data_format.metadata_key) or {})
    if not isinstance(metadata, dict):
        key = data_format.metadata_key
        raise ConfigError(f"{where}: {key!r} must be an object (--metadata-key names the key)")
    tools = _unpacked(row.get(data_format.tool_key) or [])
    if not isinstance(tools, list):
        raise ConfigError(
            f"{where}: {data_format.tool_key!r} must be a list of tools (--tool-key names the key)"
        )
    return {**metadata, "tools": tools} if tools else dict(metadata)


def _unpacked(value: Any) -> Any:
    """Parse an object that a file stores as JSON text; None if the text is not JSON."""
    try:
        return orjson.loads(value) if isinstance(value, str) else value
    except orjson.JSONDecodeError:
        return None


def _render(
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]] | None,
    where: str,
    data_format: DataFormat,
    tokenizer: PreTrainedTokenizerBase | None,
) -> str:
    if tokenizer is None or not tokenizer.chat_template:
        raise ConfigError(
            "--apply-chat-template: the tokenizer of --hf-checkpoint has no chat template; "
            "remove the flag, or add a chat_template to its tokenizer_config.json"
        )
    try:
        return tokenizer.apply_chat_template(  # type: ignore[return-value]
            messages,
            tools=tools,  # type: ignore[arg-type]
            tokenize=False,
            add_generation_prompt=True,
            **data_format.chat_template_kwargs,
        )
    except Exception as error:  # a template is a program from the checkpoint and may raise anything
        raise ConfigError(
            f"{where}: the chat template fails for this prompt: {type(error).__name__}: {error}"
        ) from None


def _filter_by_length(
    samples: list[Sample],
    data_format: DataFormat,
    tokenizer: PreTrainedTokenizerBase | None,
    folder: Path,
) -> list[Sample]:
    assert tokenizer is not None and data_format.max_prompt_len is not None
    for start in range(0, len(samples), _TOKENIZE_CHUNK):
        chunk = samples[start : start + _TOKENIZE_CHUNK]
        texts = [sample.prompt for sample in chunk if isinstance(sample.prompt, str)]
        if len(texts) < len(chunk):
            raise ConfigError(
                f"{data_format.max_prompt_flag}: prompts that are lists of messages must be rendered "
                "before their length is known; add --apply-chat-template"
            )
        encoded = tokenizer(texts, add_special_tokens=not data_format.apply_chat_template)
        for sample, ids in zip(chunk, encoded["input_ids"], strict=True):
            sample.tokens = list(ids)
            if sample.image_files:
                images = [read_image(f, folder, data_format.media_path) for f in sample.image_files]
                processor = load_image_processor(data_format.checkpoint)
                sample.tokens = processor.expand(sample.tokens, images)
    return [sample for sample in samples if len(sample.tokens) <= data_format.max_prompt_len]


def _describe(value: Any) -> str:
    if isinstance(value, (str, list, dict)) and not value:
        return f"an empty {type(value).__name__}"
    return "null" if value is None else f"of type {type(value).__name__}"
