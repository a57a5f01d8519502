"""A Hugging Face model is trained on by pawl: it starts at the model's own loss, falls, and goes back out."""

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny_run
import torch
import yaml
from hf_world import make_model
from transformers import AutoModelForCausalLM, PreTrainedModel

from trainer.config.load import load_config
from trainer.data.loader import Loader
from trainer.mesh.topology import Topology

STEPS, WARMUP, SEQUENCE = 12, 4, 16
PLAIN = Path("attempts/0000/cycles/0000")


def trainer(*words: str) -> str:
    done = subprocess.run([sys.executable, "-m", "trainer", *words], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def finetuning(checkpoint: Path, folder: Path) -> Path:
    """A config as a user makes it: the imported sections, and the rest of a run with its rate warmed up again."""
    body = yaml.safe_load(tiny_run.make(folder, train_steps=STEPS, interval=STEPS, accumulation=4).read_text())
    body |= yaml.safe_load((checkpoint / "config.yaml").read_text())
    scheduler = {"learning_rate": 0.01, "lr_warmup_steps": WARMUP, "lr_decay_style": "cosine", "min_decay_lr": 0.001}
    body["optimizer"]["learning_rate_scheduler"] = scheduler
    body["data"]["dataset"] = {"dataset_folder": [str(folder / "data" / "a")]}
    path = folder / "finetune.yaml"
    path.write_text(yaml.safe_dump(body))
    return path


def loss_of_hf(model: PreTrainedModel, config: Path, step: int) -> float:
    """transformers' mean loss over the batch that pawl trains on in `step`."""
    loaded = load_config(config)
    batch = Loader(loaded, Topology(), 0).batch(step - 1, (step - 1) * loaded.global_batch_size)
    total, valid = 0.0, 0
    for ids_BT, labels_BT in zip(batch.input_ids_MBT, batch.labels_MBT, strict=True):
        with torch.no_grad():
            logits = model(input_ids=ids_BT).logits.double()
        kept = labels_BT != -100
        total += float(torch.nn.functional.cross_entropy(logits[kept], labels_BT[kept], reduction="sum"))
        valid += int(kept.sum())
    return total / valid


@pytest.mark.parametrize("kind", ["smollm3"])
def test_a_model_from_outside_is_trained_on_and_goes_back(kind: str, tmp_path: Path) -> None:
    model = make_model(kind, vocab_size=tiny_run.VOCAB, initializer_range=0.3)
    model.save_pretrained(tmp_path / "hf")
    convert = ("convert", "--checkpoint-path")
    trainer(*convert, str(tmp_path / "hf"), "--save-path", str(tmp_path / "ckpt"), "--target-format", "pawl")
    config = finetuning(tmp_path / "ckpt", tmp_path)
    output = trainer("train", "--config-file", str(config), "--run-dir", str(tmp_path / "run"))
    assert f"starts at step 0 from the weights of {tmp_path / 'ckpt'}" in output
    text = (tmp_path / "run" / PLAIN / "train.jsonl").read_text()
    lines: list[dict[str, Any]] = [json.loads(line) for line in text.splitlines()]
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    assert lines[0]["loss"] == pytest.approx(loss_of_hf(model, config, 1), abs=1e-5)
    rates = [line["lr"] for line in lines]
    assert rates[:WARMUP] == sorted(rates[:WARMUP]) and max(rates) == pytest.approx(0.01)
    assert math.isclose(lines[0]["consumed_samples"], 8)
    (trained,) = (tmp_path / "run" / "checkpoints").glob(f"step-{STEPS:09d}.*")
    trainer(*convert, str(trained), "--save-path", str(tmp_path / "out"), "--target-format", "hf")
    after, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert loss_of_hf(after, config, 1) < lines[0]["loss"] - 0.2, "it learned what it was trained on"
    before, now = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("hf", "out"))
    assert {key: now.get(key) for key in before} == before
