"""configs/seed-1.7b.yaml is the YAML of the text the product was asked from: same keys and values, in order."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
SEED = ROOT.parent / "shared" / "design" / "seed.txt"


def lines_of(text: str) -> list[str]:
    """Lines without indentation (the text lost it), comments and blank lines."""
    stripped = (line.split(" #")[0].strip() for line in text.splitlines())
    return [line for line in stripped if line and not line.startswith("#")]


def test_the_seed_config_is_unchanged() -> None:
    if not SEED.is_file():
        print(f"\nNOT CHECKED: {SEED} is not here, so nothing to compare configs/seed-1.7b.yaml with.")
        return
    text = SEED.read_text()
    begin = text.index("general:\nproject:")
    end = text.index("- 0.6", begin) + len("- 0.6")
    assert lines_of((ROOT / "configs" / "seed-1.7b.yaml").read_text()) == lines_of(text[begin:end])
