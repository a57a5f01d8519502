"""The demo's check of an export has pawl's held-out loss from transformers, also where documents are kept apart."""

from pathlib import Path

import pytest
import tiny_run
import torch
import yaml
from transformers import AutoModelForCausalLM

from ops.demo.check_export import held_out_loss
from trainer.checkpoint.saver import save_checkpoint
from trainer.checkpoint.state import RunState
from trainer.config import load_config
from trainer.convert.export_hf import export_hf
from trainer.data.loader import Loader
from trainer.engine import Engine
from trainer.mesh.context import ParallelContext
from trainer.mesh.topology import Topology


@pytest.mark.parametrize("masks", [False, True], ids=["one text", "documents apart"])
def test_the_check_reads_samples_as_the_run_did(masks: bool, tmp_path: Path) -> None:
    path = tiny_run.make(tmp_path)
    body = yaml.safe_load(path.read_text())
    body["tokens"]["document_masks"] = masks
    body["model"]["init_method"] = {"std": 0.3}
    path.write_text(yaml.safe_dump(body))
    config = load_config(path)
    engine = Engine(config, ParallelContext(Topology(), device=torch.device("cpu")))
    engine.init_weights()
    sums = [engine.eval_loss(batch) for _, batch in Loader(config, Topology(), 0).validation_batches()]
    ours = sum(loss for loss, _ in sums) / sum(count for _, count in sums)
    saved = save_checkpoint(
        engine, RunState(step=1, adam_t=1), checkpoints_dir=tmp_path, epoch="a0001g01c0001", run="tiny",
        config_text=path.read_text(), tokenizer=None,
    )  # fmt: skip
    done = export_hf(tmp_path / saved.name, tmp_path / "out")
    assert any("document masks" in note for note in done.notes) == masks
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    with torch.no_grad():
        theirs, num_valid = held_out_loss(model, path)
    assert theirs == pytest.approx(ours, abs=1e-5) and num_valid == sum(count for _, count in sums)
    if masks:
        body["tokens"]["document_masks"] = False
        path.write_text(yaml.safe_dump(body))
        with torch.no_grad():
            assert abs(held_out_loss(model, path)[0] - ours) > 1e-3, "read as one text it is another loss"
