"""Load the exported folder with transformers in this process, offline, and compare it with pawl.

Prints generated text and the loss over the run's fixed held-out set; exits 1 when it differs from pawl's own by more
than the tolerance. A run with document masks is compared with documents kept apart, as it was trained.
Usage: python -m ops.demo.check_export RUN_DIR EXPORT_DIR [--tolerance 1e-4]
"""

import argparse
import json
import os
import sys
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported: nothing may be fetched

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from trainer.config import load
from trainer.data.loader import Loader
from trainer.mesh.topology import Topology


def held_out_loss(model: torch.nn.Module, config_path: Path) -> tuple[float, int]:
    """(mean loss over valid labels, their number) of the fixed held-out set, with the logits of `model`.

    With tokens.document_masks the model gets pawl's positions and a mask that keeps documents apart; left to itself it
    would read a sample as one text, and a right export would look wrong.
    """
    config = load(config_path).config
    if config is None:
        raise SystemExit(f"{config_path} does not load; run: pawl check {config_path}")
    loss_sum, num_valid = 0.0, 0
    for _, batch in Loader(config, Topology(dp=1, pp=1, tp=1), 0).validation_batches():
        micro_batches = zip(batch.input_ids_MBT, batch.labels_MBT, batch.position_ids_MBT, strict=True)
        for ids_BT, labels_BT, positions_BT in micro_batches:
            more = apart(positions_BT) if config.tokens.document_masks else {}
            logits_BTV = model(input_ids=ids_BT, **more).logits.float()
            valid = labels_BT != -100
            loss_sum += float(
                torch.nn.functional.cross_entropy(logits_BTV[valid], labels_BT[valid], reduction="sum").double()
            )
            num_valid += int(valid.sum())
    return loss_sum / num_valid, num_valid


def apart(positions_BT: torch.Tensor) -> dict[str, torch.Tensor]:
    """What keeps documents apart in transformers: their positions, and a mask [B, 1, T, T] to add to scores."""
    document_BT = (positions_BT == 0).cumsum(dim=-1)
    seen_BTT = (document_BT[:, :, None] == document_BT[:, None, :]).tril()
    mask = torch.zeros(seen_BTT.shape).masked_fill(~seen_BTT, float("-inf")).unsqueeze(1)
    return {"position_ids": positions_BT, "attention_mask": mask}


def pawl_loss(run_dir: Path) -> float:
    """The loss that the trainer wrote after the last step (newest validation.jsonl)."""
    lines = [
        json.loads(line)
        for path in sorted(run_dir.glob("attempts/*/cycles/*/validation.jsonl"))
        for line in path.read_text().splitlines()
    ]
    if not lines:
        raise SystemExit(f"{run_dir}: no validation.jsonl; the run has not finished")
    return float(lines[-1]["loss"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("export_dir", type=Path)
    parser.add_argument("--tolerance", type=float, default=1e-4)
    args = parser.parse_args()
    disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(args.export_dir)
    model = AutoModelForCausalLM.from_pretrained(args.export_dir, dtype=torch.float32).eval()
    with torch.no_grad():
        prompt = tokenizer("Enter the King.\n", return_tensors="pt")
        torch.manual_seed(7)
        out = model.generate(**prompt, max_new_tokens=60, do_sample=True, top_k=40)
        print(tokenizer.decode(out[0], skip_special_tokens=True))
        print("…")
        theirs, num_valid = held_out_loss(model, args.run_dir / "run.yaml")
    ours = pawl_loss(args.run_dir)
    print(f"held-out loss over {num_valid:,} tokens: transformers {theirs:.6f}, pawl {ours:.6f}, ", end="")
    print(f"difference {abs(theirs - ours):.1e} (allowed {args.tolerance:.0e})")
    return 0 if abs(theirs - ours) <= args.tolerance else 1


if __name__ == "__main__":
    sys.exit(main())
