"""Nanotron's files, brought into this trainer's own keys before the sections are typed.

Three things happen, each said at its line:
    rewritten   another spelling of a key that exists here (context_parallel_size, a folder without a list, flat adam_*)
    dropped     a key without effect here: silent at nanotron's neutral value, else a warning that names what is missing
    refused     a key that would change what is trained: silent at its neutral value, else an error
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from .problems import Problem, Severity
from .rope import one_rope
from .typed import child_of, kind_of
from .yaml_loader import Mapping, Node, Scalar, Sequence

ANY = "*"


@dataclass(frozen=True, slots=True)
class Old:
    """A key known from nanotron. `neutral` values (and null) are dropped silently; `*` in `path` is every list item."""

    path: str
    severity: Severity
    why: str
    neutral: tuple[str, ...] = ()


def _dropped(path: str, why: str, *neutral: str) -> Old:
    return Old(path, Severity.WARNING, why, neutral)


def _refused(path: str, why: str, *neutral: str) -> Old:
    return Old(path, Severity.ERROR, why, neutral)


_M = "model.model_config."
_S = "data_stages.*."
_BOTH = ("true", "false")
_WINDOW = ("wait", "warmup", "active", "repeat", "skip_first")

OLD_KEYS = (
    # sections
    _dropped("lighteval", "evaluation jobs are not started from here; the section is ignored"),
    _dropped("s3_upload", "checkpoints are not uploaded; the section is ignored"),
    _dropped(
        "metrics_logging", "of each layer logging.grad_norms_interval logs gradient norms; the section is ignored"
    ),
    # profiler
    _dropped("profiler.profiler_export_path", "traces lie in profile/ of the run directory; ignored"),
    *(_dropped(f"profiler.{key}", "the steps are profiler.first_step and num_steps; ignored") for key in _WINDOW),
    _dropped("profiler.export_chrome_trace", "Chrome's format is the one there is", *_BOTH),
    # general
    _dropped("general.benchmark_csv_path", "there is no benchmark file; the key is ignored"),
    _dropped("general.ignore_sanity_checks", "checks are always made", *_BOTH),
    _refused("general.consumed_train_samples", "the data position comes from the checkpoint", "0"),
    # parallelism
    _dropped("parallelism.tp_linear_async_communication", "communication is not overlapped this way; ignored", "false"),
    _dropped("parallelism.tp_recompute_allgather", "gathered inputs are kept, not gathered again", *_BOTH),
    _dropped("parallelism.moe_layer_recompute", "there are no experts", "false"),
    # model
    _dropped("model.make_vocab_size_divisible_by", "the vocabulary is padded inside, never in a checkpoint", "1"),
    _dropped("model.ddp_bucket_cap_mb", "bucket sizes follow from the layout; ignored", "25"),
    _refused("model.init_method.scaling_method", "only NUM_LAYERS is known", "NUM_LAYERS"),
    _dropped(_M + "is_llama_config", "the architecture is model_type", "true"),
    _refused(_M + "is_starcoder2_config", "nanotron's Starcoder2 is not read; write model_type: starcoder2", "false"),
    _dropped(_M + "is_qwen2_config", "nanotron's Qwen2 without biases is Llama; trained as such", "false"),
    _dropped(_M + "use_cache", "only generation has a cache", *_BOTH),
    _dropped(_M + "pretraining_tp", "it has no effect, here or there", *map(str, range(1, 65))),
    _dropped(_M + "_attn_implementation", "the attention kernel is chosen by the trainer; ignored"),
    _dropped(_M + "_fused_rms_norm", "kernels are chosen by the trainer", *_BOTH),
    _dropped(_M + "_fused_rotary_emb", "kernels are chosen by the trainer", *_BOTH),
    _dropped(_M + "_use_qkv_packed", "q, k and v are separate here; same numbers", *_BOTH),
    _dropped(_M + "ring_attn_heads_k_stride", "there is no ring attention; ignored"),
    _dropped(_M + "log_attn_probs", "attention statistics are not logged; ignored", "false"),
    _dropped(_M + "z_loss_coefficient", "z-loss is off", "1e-4", "0.0001", "1.0e-05", "1e-5", "0.00001"),
    _refused(_M + "z_loss_enabled", "true or false switches z-loss on or off", "false"),
    _refused(_M + "flex_attention_mask", "attention masks other than causal are not offered"),
    _refused(_M + "sliding_window_size", "sliding-window attention is not offered"),
    _refused(_M + "no_rope_layer", "only smollm3 has layers without rotary positions: write no_rope_layer_interval"),
    _refused(_M + "hidden_dropout", "pretraining here uses no dropout", "0", "0.0"),
    _refused(_M + "dropout", "pretraining here uses no dropout", "0", "0.0"),
    _refused(_M + "moe_config", "mixtures of experts are not offered"),
    _refused(_M + "rope_interleaved", "interleaved rotary pairs are not offered", "false"),
    _refused(_M + "interleaved_rotary", "interleaved rotary pairs are not offered", "false"),
    _refused(_M + "rope_seq_len_interpolation_factor", "rotary interpolation is not offered"),
    # optimizer
    _refused(
        "optimizer.weight_decay_exclude_named_params",
        "write optimizer.groups with weight_decay_mult: 0 and Hugging Face names; norms never decay",
    ),
    # tokens
    _dropped("tokens.limit_val_batches", "data.validation.num_samples sets how much; ignored", "0"),
    _dropped("tokens.limit_test_batches", "there is no test set; ignored", "0"),
    # checkpoints
    _dropped("checkpoints.checkpoints_path_is_shared_file_system", "the run directory is always shared", *_BOTH),
    _dropped("checkpoints.save_initial_state", "no checkpoint is written before step 1; ignored", "false"),
    _dropped("checkpoints.save_final_state", "the last step is always saved", *_BOTH),
    _refused("checkpoints.resume_checkpoint_path", "a run resumes from its own checkpoints only"),
    _refused("checkpoints.load_optimizer", "a run always resumes whole", "true"),
    _refused("checkpoints.load_lr_scheduler", "a run always resumes whole", "true"),
    # tokenizer
    _dropped("tokenizer.tokenizer_revision", "the tokenizer's files are taken as they are; ignored"),
    _dropped("tokenizer.tokenizer_max_length", "sequence_length is the length; ignored"),
)

_DATA_KEYS: tuple[tuple[str, Severity, str, tuple[str, ...]], ...] = (
    ("num_loading_workers", Severity.WARNING, "batches are read by the rank itself", tuple(map(str, range(65)))),
    ("dataset.dataset_read_path", Severity.WARNING, "dataset_folder is read; this local copy is ignored", ()),
    ("dataset.tokenizer_name", Severity.WARNING, "a token folder states its own tokenizer; ignored", ()),
    ("dataset.vocab_size", Severity.WARNING, "a token folder states its own vocabulary; ignored", ()),
    ("dataset.token_size_in_bytes", Severity.WARNING, "a token folder states its own width; ignored", ()),
    ("dataset.return_positions", Severity.WARNING, "positions are counted per sample", _BOTH),
    ("dataset.use_old_brrr_dataloader", Severity.WARNING, "there is one loader", _BOTH),
    ("dataset.pad_samples_to_global_batch_size", Severity.WARNING, "samples never run out; ignored", ("false",)),
    ("dataset.shuffle_files", Severity.WARNING, "samples are always shuffled; ignored", ("false",)),
    ("dataset.skip_in_stream", Severity.WARNING, "samples are found by number; ignored", _BOTH),
    ("dataset.dataset_max_tokens", Severity.ERROR, "limiting the tokens of a source is not offered", ()),
)
_HF_KEYS = (
    "hf_dataset_or_datasets",
    "hf_dataset_splits",
    "hf_dataset_config_name",
    "dataset_processing_num_proc_per_process",
    "dataset_overwrite_cache",
    "text_column_name",
)

# null at these keys means the default, as in nanotron; elsewhere nothing is no value.
_NULL_IS_DEFAULT = (
    "general.seed",
    "parallelism.pp_engine",
    "parallelism.tp_mode",
    "model.dtype",
    _M + "num_key_value_heads",
    _M + "head_dim",
    "optimizer.learning_rate_scheduler.lr_warmup_style",
    "optimizer.learning_rate_scheduler.lr_decay_style",
    "logging.log_level",
    "logging.log_level_replica",
    "logging",
    "checkpoints",
)
_ADAM = ("adam_beta1", "adam_beta2", "adam_eps", "torch_adam_is_fused")


def translate(root: Mapping) -> tuple[Mapping, list[Problem]]:
    """The tree in our spelling, and what was said about the rest."""
    problems: list[Problem] = []
    tree: Node = root
    tree = edit(tree, "parallelism", lambda node, path: _rename_cp(node, problems))
    tree = _recompute(tree)
    tree = edit(tree, "model.model_config", lambda node, path: one_rope(_smollm3(_qwen2(node)), path, problems))
    tree = _z_loss(tree)
    tree = _document_masks(tree)
    tree = edit(tree, "optimizer", lambda node, path: _gather_adam(node, problems))
    tree = edit(tree, "general.run", lambda node, path: _without_placeholders(node, problems))
    for data in ("data", _S + "data"):
        tree = edit(tree, f"{data}.dataset", lambda node, path: _dataset(node, path, problems))
        tree = edit(tree, f"{data}.validation", lambda node, path: _folder_list(node))
    tree = edit(tree, _S + "sequence_length", lambda node, path: _same_length(node, root, path, problems))
    for old in (*OLD_KEYS, *_per_data(root)):
        tree = edit(tree, old.path, partial(_drop, old, problems))
    tree = edit(tree, "tokens.val_check_interval", lambda node, path: None if _is_never(node) else node)
    for path in _NULL_IS_DEFAULT:
        tree = edit(tree, path, lambda node, path: None if isinstance(node, Scalar) and node.is_null else node)
    assert isinstance(tree, Mapping)
    return tree, problems


def edit(node: Node, path: str, change: Callable[[Node, str], Node | None], at: str = "") -> Node:
    """`node` with `change(found, its path)` in place of whatever stands at `path`; None takes the key out."""
    head, _, rest = path.partition(".")
    if head == ANY:
        if not isinstance(node, Sequence):
            return node
        items = tuple(edit(item, rest, change, f"{at}.{i}".strip(".")) for i, item in enumerate(node.items))
        return replace(node, items=items)
    if not isinstance(node, Mapping) or head not in node.entries:
        return node
    where = f"{at}.{head}".strip(".")
    old = node.entries[head]
    new = edit(old, rest, change, where) if rest else change(old, where)
    if new is old:
        return node
    entries = {key: new if key == head else child for key, child in node.entries.items()}
    return replace(node, entries={key: child for key, child in entries.items() if child is not None})


def _is_never(node: Node) -> bool:
    """Nanotron's -1 (and 0): not during the training."""
    return isinstance(node, Scalar) and (node.is_null or node.text in ("-1", "0"))


def _per_data(root: Mapping) -> list[Old]:
    prefixes = ["data."] if "data" in root.entries else []
    prefixes += [_S + "data."] if "data_stages" in root.entries else []
    return [
        Old(prefix + key, severity, why, neutral) for prefix in prefixes for key, severity, why, neutral in _DATA_KEYS
    ]


def _drop(old: Old, problems: list[Problem], node: Node, path: str) -> None:
    empty = (isinstance(node, Scalar) and node.is_null) or (isinstance(node, Sequence) and not node.items)
    if not empty and not (isinstance(node, Scalar) and node.text.lower() in [word.lower() for word in old.neutral]):
        expected = None if old.severity is Severity.WARNING else " or ".join((*old.neutral[:1], "no such key"))
        _say(problems, old.severity, node, path, old.why, expected=expected)
    return None


def _say(
    problems: list[Problem], severity: Severity, node: Node, path: str, why: str, *, expected: str | None = None
) -> None:
    found = kind_of(node)
    problems.append(
        Problem(
            severity=severity, file=node.file, line=node.line, key=path, found=found, expected=expected, message=why
        )
    )


def _rename_cp(node: Node, problems: list[Problem]) -> Node:
    if not isinstance(node, Mapping) or "context_parallel_size" not in node.entries:
        return node
    entries = dict(node.entries)
    old = entries.pop("context_parallel_size")
    if "cp" in entries:
        why = "cp and context_parallel_size are one setting, given twice"
        _say(problems, Severity.ERROR, old, "parallelism.context_parallel_size", why, expected="one of them")
    elif not (isinstance(old, Scalar) and old.is_null):
        entries["cp"] = old
    return replace(node, entries=entries)


def _recompute(root: Node) -> Node:
    """`parallelism.recompute_layer: true` is `model.recompute: full`, where that says nothing else."""
    mesh, model = child_of(root, "parallelism"), child_of(root, "model")
    old = child_of(mesh, "recompute_layer") if mesh is not None else None
    if not isinstance(old, Scalar) or old.text.lower() not in (*_BOTH, "null"):
        return root  # not there, or no yes or no: the section's own check will say so
    root = edit(root, "parallelism.recompute_layer", lambda node, path: None)
    if old.text.lower() != "true" or not isinstance(model, Mapping) or "recompute" in model.entries:
        return root
    full = {"recompute": replace(old, text="full")}
    return edit(root, "model", lambda node, path: replace(model, entries={**model.entries, **full}))


def _qwen2(node: Node) -> Node:
    """is_qwen2_config with attention_bias has biases on q, k and v alone: Hugging Face's qwen2."""
    flags = [child_of(node, key) for key in ("is_qwen2_config", "attention_bias")]
    if not isinstance(node, Mapping) or "model_type" in node.entries:
        return node
    if not all(isinstance(flag, Scalar) and flag.text.lower() == "true" for flag in flags):
        return node
    kept = {key: child for key, child in node.entries.items() if key not in ("is_qwen2_config", "attention_bias")}
    flag = node.entries["is_qwen2_config"]
    name = Scalar(text="qwen2", quoted=True, file=flag.file, line=flag.line)
    return replace(node, entries={**kept, "model_type": name})


def _smollm3(node: Node) -> Node:
    """no_rope_layer: n, without rotary positions in every n-th layer, is Hugging Face's smollm3."""
    every = child_of(node, "no_rope_layer")
    if not isinstance(node, Mapping) or not isinstance(every, Scalar) or every.is_null or "model_type" in node.entries:
        return node
    kept = {key: child for key, child in node.entries.items() if key not in ("no_rope_layer", "is_qwen2_config")}
    name = replace(every, text="smollm3", quoted=True)
    return replace(node, entries={**kept, "model_type": name, "no_rope_layer_interval": every})


def _document_masks(root: Node) -> Node:
    """model_config._use_doc_masking is tokens.document_masks, where that says nothing else."""
    model, tokens = child_of(root, "model"), child_of(root, "tokens")
    shape = child_of(model, "model_config") if model is not None else None
    flag = child_of(shape, "_use_doc_masking") if shape is not None else None
    if flag is None:
        return root
    root = edit(root, _M + "_use_doc_masking", lambda node, path: None)
    if (isinstance(flag, Scalar) and flag.is_null) or not isinstance(tokens, Mapping):
        return root
    entries = {"document_masks": flag, **tokens.entries}
    return edit(root, "tokens", lambda node, path: replace(tokens, entries=entries))


def _z_loss(root: Node) -> Node:
    """model_config.z_loss_enabled: true is optimizer.z_loss_coefficient, 1e-4 where nanotron's file names none."""
    model, optimizer = child_of(root, "model"), child_of(root, "optimizer")
    shape = child_of(model, "model_config") if model is not None else None
    flag = child_of(shape, "z_loss_enabled") if shape is not None else None
    if not isinstance(flag, Scalar) or flag.text.lower() != "true" or not isinstance(optimizer, Mapping):
        return root
    given = child_of(shape, "z_loss_coefficient") if shape is not None else None
    value = replace(flag, text="1e-4") if given is None or (isinstance(given, Scalar) and given.is_null) else given
    for key in ("z_loss_enabled", "z_loss_coefficient"):
        root = edit(root, _M + key, lambda node, path: None)
    entries = {"z_loss_coefficient": value, **optimizer.entries}
    return edit(root, "optimizer", lambda node, path: replace(optimizer, entries=entries))


def _gather_adam(node: Node, problems: list[Problem]) -> Node:
    """Older files have adam_* beside learning_rate_scheduler; they belong under optimizer_factory."""
    flat = [key for key in _ADAM if isinstance(node, Mapping) and key in node.entries]
    if not isinstance(node, Mapping) or not flat:
        return node
    factory = node.entries.get("optimizer_factory", Mapping(file=node.file, line=node.line))
    if not isinstance(factory, Mapping):
        return node
    for key in flat:
        _say(
            problems,
            Severity.WARNING,
            node.entries[key],
            f"optimizer.{key}",
            f"read as optimizer.optimizer_factory.{key}",
        )
    inner = {**{key: node.entries[key] for key in flat}, **factory.entries}
    rest = {key: child for key, child in node.entries.items() if key not in flat}
    return replace(node, entries={**rest, "optimizer_factory": replace(factory, entries=inner)})


def _without_placeholders(node: Node, problems: list[Problem]) -> Node:
    if not isinstance(node, Scalar) or not re.search(r"%(date|jobid)", node.text):
        return node
    name = re.sub(r"[-_]*%(date|jobid)", "", node.text).strip("-_") or "run"
    why = f"%date and %jobid mean nothing to a run that outlives its jobs; the run is named '{name}'"
    _say(problems, Severity.WARNING, node, "general.run", why)
    return replace(node, text=name)


def _dataset(node: Node, path: str, problems: list[Problem]) -> Node:
    if isinstance(node, Scalar) and node.is_null:
        _say(
            problems, Severity.ERROR, node, path, "random tokens are not offered", expected="dataset_folder with a list"
        )
        return _placeholder(node)
    if not isinstance(node, Mapping):
        return node
    hub = [key for key in node.entries if key in _HF_KEYS or key.startswith(("prompt_", "completion_", "sft_"))]
    if hub:
        why = "text is not tokenised while training; prepare it once (data prepare) and give the folders"
        _say(problems, Severity.ERROR, node.entries[hub[0]], f"{path}.{hub[0]}", why, expected="dataset_folder")
        return _placeholder(node)
    return _folder_list(_weights_from_table(node))


def _placeholder(node: Node) -> Mapping:
    """Stands for a data set that was refused, so that nothing more is said about it."""
    folder = Scalar(text="?", quoted=True, file=node.file, line=node.line)
    folders = Sequence(items=(folder,), file=node.file, line=node.line)
    return Mapping(entries={"dataset_folder": folders}, file=node.file, line=node.line)


def _weights_from_table(node: Mapping) -> Mapping:
    """`dataset_folder: {a: 0.8, b: 0.2}` is a list of folders and one of weights."""
    table = node.entries.get("dataset_folder")
    if not isinstance(table, Mapping) or "dataset_weights" in node.entries:
        return node
    names = tuple(Scalar(text=key, quoted=True, file=v.file, line=v.line) for key, v in table.entries.items())
    folders = Sequence(items=names, file=table.file, line=table.line)
    weights = Sequence(items=tuple(table.entries.values()), file=table.file, line=table.line)
    return replace(node, entries={**node.entries, "dataset_folder": folders, "dataset_weights": weights})


def _folder_list(node: Node) -> Node:
    """One folder may stand without a list."""
    folder = child_of(node, "dataset_folder")
    if not isinstance(node, Mapping) or not isinstance(folder, Scalar) or folder.is_null:
        return node
    one = Sequence(items=(folder,), file=folder.file, line=folder.line)
    return replace(node, entries={**node.entries, "dataset_folder": one})


def _same_length(node: Node, root: Mapping, path: str, problems: list[Problem]) -> None:
    tokens = root.entries.get("tokens")
    length = child_of(tokens, "sequence_length") if tokens is not None else None
    null = isinstance(node, Scalar) and node.is_null
    if not null and not (isinstance(node, Scalar) and isinstance(length, Scalar) and node.text == length.text):
        why = "all stages have the length of tokens.sequence_length"
        _say(problems, Severity.ERROR, node, path, why, expected="no such key")
    return None
