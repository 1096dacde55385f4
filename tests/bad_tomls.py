"""TOML files that are refused, each with its exact message: tested, and shown in the docs.

``tests/data/toml_errors.md`` is made from this table by ``tests/generate_toml_errors.py``.
"""

from dataclasses import dataclass, field

__all__ = ["BAD_TOMLS", "BadToml"]

DEBUG = 'extends = "deepseek_v3.deepseek_v3_debugmodel"\n'


@dataclass(frozen=True)
class BadToml:
    """One file that is refused."""

    chapter: str
    title: str
    toml: str
    """The text of ``bad.toml``."""
    message: str
    files: dict[str, str] = field(default_factory=dict)
    """Other files that are there, by name."""
    name: str = "bad.toml"
    """The file that is loaded, where it is not bad.toml."""

    @property
    def written(self) -> dict[str, str]:
        """Every file, by name, to its text."""
        return {**({self.name: self.toml} if self.toml else {}), **self.files}

    @property
    def id(self) -> str:
        """For pytest."""
        return self.title.replace(" ", "-")


BAD_TOMLS = (
    BadToml(
        "The file",
        "no such file",
        "",
        "moe_debgu.toml: no such file; did you mean 'moe_debug.toml'?",
        files={"moe_debug.toml": ""},
        name="moe_debgu.toml",
    ),
    BadToml(
        "The file",
        "a file of another kind",
        "",
        "config.yaml: expected a file whose name ends in .toml.",
        files={"config.yaml": "a: 1\n"},
        name="config.yaml",
    ),
    BadToml(
        "The file",
        "a syntax error",
        DEBUG + ("[training]\nsteps = = 3\n"),
        "bad.toml: line 3, column 9: not valid TOML: Invalid value.",
    ),
    BadToml(
        "The file",
        "a syntax error at the end",
        DEBUG + "[training",
        (
            "bad.toml: line 2, column 10: not valid TOML: Expected ']' at the end of a table "
            "declaration."
        ),
    ),
    BadToml(
        "The file",
        "a string without quotes",
        DEBUG + "dump_folder = outputs\n",
        "bad.toml: line 2, column 15: not valid TOML: Invalid value.",
    ),
    BadToml(
        "The file",
        "a key given twice",
        DEBUG + ("[training]\nsteps = 3\nsteps = 4\n"),
        "bad.toml: line 4, column 10: not valid TOML: Cannot overwrite a value.",
    ),
    BadToml(
        "The file",
        "a section given twice",
        DEBUG + ("[training]\nsteps = 3\n[training]\nseq_len = 4\n"),
        "bad.toml: line 4, column 10: not valid TOML: Cannot declare ('training',) twice.",
    ),
    BadToml(
        "What it extends",
        "no extends",
        ("[training]\nsteps = 3\n"),
        (
            "bad.toml: extends: missing; say first what this file changes, as in extends = "
            '"deepseek_v3.deepseek_v3_16b".'
        ),
    ),
    BadToml(
        "What it extends",
        "extends below a section",
        ('[training]\nsteps = 3\nextends = "llama3.llama3_8b"\n'),
        "bad.toml: extends: stands in [training]; it has to come before the first section.",
    ),
    BadToml(
        "What it extends",
        "extends is not a string",
        'extends = ["llama3.llama3_8b"]\n',
        (
            "bad.toml: extends: expected one name or one path, as in extends = "
            '"deepseek_v3.deepseek_v3_16b".'
        ),
    ),
    BadToml(
        "What it extends",
        "a missing base file",
        'extends = "base/moe_debug.toml"\n',
        "bad.toml: extends: base/moe_debug.toml: no such file; did you mean 'moe_debug.toml'?",
    ),
    BadToml(
        "What it extends",
        "a misspelled base file",
        'extends = "bsae.toml"\n',
        "bad.toml: extends: bsae.toml: no such file; did you mean 'base.toml'?",
        files={"base.toml": DEBUG},
    ),
    BadToml(
        "What it extends",
        "a misspelled name of a shipped file",
        'extends = "moe_debgu.toml"\n',
        "bad.toml: extends: moe_debgu.toml: no such file; did you mean 'moe_debug.toml'?",
    ),
    BadToml(
        "What it extends",
        "circular extends",
        'extends = "middle.toml"\n',
        "middle.toml: extends: circular: bad.toml -> middle.toml -> bad.toml.",
        files={"middle.toml": 'extends = "bad.toml"\n'},
    ),
    BadToml(
        "What it extends",
        "a file that extends itself",
        'extends = "bad.toml"\n',
        "bad.toml: extends: circular: bad.toml -> bad.toml.",
    ),
    BadToml(
        "What it extends",
        "a mistake in the base file",
        'extends = "base.toml"\n',
        'base.toml: training.steps: expected a valid integer, got "many".',
        files={"base.toml": DEBUG + ('[training]\nsteps = "many"\n')},
    ),
    BadToml(
        "What it extends",
        "a config function without its module",
        'extends = "deepseek_v3_16b"\n',
        (
            'bad.toml: extends: expected "MODULE.FUNCTION" or "FILE.toml", got "deepseek_v3_16b";'
            " did you mean deepseek_v3.deepseek_v3_16b?"
        ),
    ),
    BadToml(
        "What it extends",
        "an unknown module",
        'extends = "deepseek_v4.deepseek_v3_16b"\n',
        "bad.toml: extends: no module deepseek_v4; did you mean 'deepseek_v3'?",
    ),
    BadToml(
        "What it extends",
        "a misspelt module of yours",
        'extends = "my_modle.base"\n',
        "bad.toml: extends: no module my_modle; did you mean 'my_model'?",
        files={"my_model.py": ""},
    ),
    BadToml(
        "What it extends",
        "a config function that misspells a key",
        'extends = "my_typo.base"\n',
        (
            "bad.toml: extends: my_typo.base failed: AttributeError: ParallelismConfig has no key "
            "'fsdp_prefech'; did you mean 'fsdp_prefetch'?"
        ),
        files={
            "my_typo.py": "from torchtitan.models.deepseek_v3 import config_registry\n"
            "from titan_ext.run.trainer import extend_config\n\n\n"
            "def base():\n"
            "    config = extend_config(config_registry.deepseek_v3_debugmodel())\n"
            "    config.parallelism.fsdp_prefech = 2\n"
            "    return config\n"
        },
    ),
    BadToml(
        "What it extends",
        "an unknown config function",
        'extends = "deepseek_v3.deepseek_v3_15b"\n',
        (
            "bad.toml: extends: torchtitan.models.deepseek_v3.config_registry has no "
            "config function deepseek_v3_15b; did you mean 'deepseek_v3_16b'?"
        ),
    ),
    BadToml(
        "What it extends",
        "a model that is no decoder",
        'extends = "flux.flux_debugmodel"\n',
        (
            "bad.toml: extends: titan_ext does not serve flux: it is no decoder (so its units are "
            "unknown) and has a training loop of its own."
        ),
    ),
    BadToml(
        "What it extends",
        "a model that titan_ext cannot serve",
        'extends = "my_models.other_trainer"\n',
        (
            "bad.toml: extends: my_models.other_trainer: cannot extend a config of MyTrainer: "
            "titan_ext extends configs of Titan's own trainer (torchtitan.trainer.Trainer). "
            "This one has a training loop of its own."
        ),
        files={
            "my_models.py": (
                "from torchtitan.trainer import Trainer\n"
                "\n"
                "\n"
                "class MyTrainer(Trainer):\n"
                "    class Config(Trainer.Config):\n"
                "        __slots__ = ()\n"
                "\n"
                "\n"
                "def other_trainer():\n"
                "    return MyTrainer.Config()\n"
            )
        },
    ),
    BadToml(
        "What it extends",
        "a module that needs a missing package",
        'extends = "my_vision.vision_8b"\n',
        (
            "bad.toml: extends: my_vision needs the module a_missing_package: pip install "
            "a_missing_package."
        ),
        files={"my_vision.py": "import a_missing_package\n"},
    ),
    BadToml(
        "What it extends",
        "a config function that fails",
        'extends = "my_broken.broken"\n',
        "bad.toml: extends: my_broken.broken failed: RuntimeError: no such flavor",
        files={"my_broken.py": ('def broken():\n    raise RuntimeError("no such flavor")\n')},
    ),
    BadToml(
        "What it extends",
        "a function that returns no config",
        'extends = "my_numbers.number"\n',
        "bad.toml: extends: my_numbers.number is no config function: it returned int.",
        files={"my_numbers.py": ("def number():\n    return 3\n")},
    ),
    BadToml(
        "What it extends",
        "a name with a colon",
        'extends = "deepseek_v3:deepseek_v3_16b"\n',
        (
            'bad.toml: extends: expected "MODULE.FUNCTION", got "deepseek_v3:deepseek_v3_16b"; did '
            "you mean deepseek_v3.deepseek_v3_16b?"
        ),
    ),
    BadToml(
        "What it extends",
        "a file without .toml",
        'extends = "base"\n',
        'bad.toml: extends: no such file "base"; did you mean "base.toml"?',
        files={"base.toml": DEBUG},
    ),
    BadToml(
        "What it extends",
        "a folder",
        'extends = "configs"\n',
        (
            'bad.toml: extends: "configs" is a folder; expected one of its files: base.toml, '
            "large.toml."
        ),
        files={"configs/base.toml": DEBUG, "configs/large.toml": DEBUG},
    ),
    BadToml(
        "What it extends",
        "a folder that is not there",
        'extends = "configs/base"\n',
        (
            'bad.toml: extends: "configs/base": no such file; expected "MODULE.FUNCTION" or '
            '"FILE.toml".'
        ),
    ),
    BadToml(
        "What it extends",
        "a file of another kind below",
        'extends = "base.yaml"\n',
        (
            'bad.toml: extends: "base.yaml": is no TOML file; expected "MODULE.FUNCTION" or '
            '"FILE.toml".'
        ),
        files={"base.yaml": "a: 1\n"},
    ),
    BadToml(
        "Keys",
        "an unknown key",
        DEBUG + ("[training]\nseq_length = 4096\n"),
        ("bad.toml: training.seq_length: no such key of TrainingConfig; did you mean 'seq_len'?"),
    ),
    BadToml(
        "Keys",
        "an unknown key like no other",
        DEBUG + ("[compile]\nzzz = 1\n"),
        (
            "bad.toml: compile.zzz: no such key of CompileConfig; expected one of "
            "backend, components, enable, enable_async_tensor_parallel."
        ),
    ),
    BadToml(
        "Keys",
        "an unknown section",
        DEBUG + ("[trainning]\nseq_len = 4096\n"),
        "bad.toml: trainning: no such section; did you mean 'training'?",
    ),
    BadToml(
        "Keys",
        "an unknown top-level key",
        DEBUG + 'dump_foler = "out"\n',
        "bad.toml: dump_foler: no such key of Trainer; did you mean 'dump_folder'?",
    ),
    BadToml(
        "Keys",
        "an unknown key of ours",
        DEBUG + ('[parallelism]\nfsdp_warp = "block"\n'),
        (
            "bad.toml: parallelism.fsdp_warp: no such key of ParallelismConfig; did you "
            "mean 'fsdp_wrap'?"
        ),
    ),
    BadToml(
        "Keys",
        "an unknown key in a nested section",
        DEBUG + ('[validator.dataloader]\ndatset = "c4"\n'),
        (
            "bad.toml: validator.dataloader.datset: no such key of "
            "HuggingFaceTextDataLoader; did you mean 'dataset'?"
        ),
    ),
    BadToml(
        "Keys",
        "the model spec",
        DEBUG + 'model_spec = "16B"\n',
        "bad.toml: model_spec: is made by extends and [model]; a file cannot set it.",
    ),
    BadToml(
        "Values",
        "a string for an integer",
        DEBUG + ('[training]\nseq_len = "4096"\n'),
        'bad.toml: training.seq_len: expected a valid integer, got "4096".',
    ),
    BadToml(
        "Values",
        "a float for an integer",
        DEBUG + ("[training]\nsteps = 1e3\n"),
        "bad.toml: training.steps: expected a valid integer, got 1000.0.",
    ),
    BadToml(
        "Values",
        "true for an integer",
        DEBUG + ("[training]\nsteps = true\n"),
        "bad.toml: training.steps: expected a valid integer, got true.",
    ),
    BadToml(
        "Values",
        "a string for true or false",
        DEBUG + ('[compile]\nenable = "yes"\n'),
        'bad.toml: compile.enable: expected a valid boolean, got "yes".',
    ),
    BadToml(
        "Values",
        "a string for a float",
        DEBUG + ('[lr_scheduler]\ndecay_ratio = "0.8"\n'),
        ('bad.toml: lr_scheduler.decay_ratio: expected a valid number or "None", got "0.8".'),
    ),
    BadToml(
        "Values",
        "a number for a string",
        DEBUG + ("[dataloader]\ndataset = 4\n"),
        "bad.toml: dataloader.dataset: expected a valid string, got 4.",
    ),
    BadToml(
        "Values",
        "a value that is not among the choices",
        DEBUG + ('[training]\ndtype = "bfloat61"\n'),
        (
            "bad.toml: training.dtype: expected 'bfloat16' or 'float32', got \"bfloat61\"; "
            "did you mean 'bfloat16'?"
        ),
    ),
    BadToml(
        "Values",
        "a choice of ours that does not exist",
        DEBUG + ('[parallelism]\nfsdp_wrap = "layer"\n'),
        (
            "bad.toml: parallelism.fsdp_wrap: expected 'auto', 'submodule', 'experts' or 'block', "
            'got "layer".'
        ),
    ),
    BadToml(
        "Values",
        "a single value for a list",
        DEBUG + ('[compile]\ncomponents = "model"\n'),
        'bad.toml: compile.components: expected list[str], got "model".',
    ),
    BadToml(
        "Values",
        "a string for a table of names",
        DEBUG + ('[parallelism]\nfsdp_reshard_groups = "attention"\n'),
        (
            "bad.toml: parallelism.fsdp_reshard_groups: expected a table "
            '[parallelism.fsdp_reshard_groups], got "attention".'
        ),
    ),
    BadToml(
        "Values",
        "a wrong item in a list",
        DEBUG + ('[compile]\ncomponents = ["model", 2]\n'),
        "bad.toml: compile.components.1: expected a valid string, got 2.",
    ),
    BadToml(
        "Values",
        "a value for a section",
        DEBUG + "training = 3\n",
        "bad.toml: training: expected a table [training], got 3.",
    ),
    BadToml(
        "Values",
        "a section for a value",
        DEBUG + ("[training.seq_len]\nmax = 4\n"),
        'bad.toml: training.seq_len: expected a valid integer, got {"max" = 4}.',
    ),
    BadToml(
        "Values",
        "None where there must be a value",
        DEBUG + ('[training]\nsteps = "None"\n'),
        'bad.toml: training.steps: expected a valid integer, got "None".',
    ),
    BadToml(
        "Values",
        "a date",
        DEBUG + ("[debug]\nseed = 2026-01-01\n"),
        'bad.toml: debug.seed: expected a valid integer or "None", got 2026-01-01.',
    ),
    BadToml(
        "Values",
        "a date for a string",
        DEBUG + "dump_folder = 2026-01-01\n",
        "bad.toml: dump_folder: expected a valid string, got 2026-01-01.",
    ),
    BadToml(
        "Values",
        "a date where any value goes",
        DEBUG + '[override]\nimports = [["my_package.tuned", { day = 2026-01-01 }]]\n',
        "bad.toml: override.imports: no setting takes a date, got 2026-01-01.",
    ),
    BadToml(
        "Values",
        "a name for an item of a list",
        DEBUG + "[compile.components]\nmodel = true\n",
        (
            "bad.toml: compile.components.model: no such item: compile.components has 2, "
            "counted from 0."
        ),
    ),
    BadToml(
        "Values",
        "a number for a list of tables",
        DEBUG + "[optimizer]\nparam_groups = 3\n",
        "bad.toml: optimizer.param_groups: expected list[dict], got 3.",
    ),
    BadToml(
        "Values",
        "a string for a number of the optimizer",
        DEBUG + ('[optimizer.param_groups.0.optimizer_kwargs]\nlr = "1e-4"\n'),
        (
            "bad.toml: optimizer.param_groups.0.optimizer_kwargs.lr: expected a valid "
            'number, got "1e-4".'
        ),
    ),
    BadToml(
        "Values",
        "an unknown item of a list",
        DEBUG + ("[optimizer.param_groups.1.optimizer_kwargs]\nlr = 1e-4\n"),
        (
            "bad.toml: optimizer.param_groups.1: no such item: optimizer.param_groups has 1, "
            "counted from 0."
        ),
    ),
    BadToml(
        "Values",
        "a required key is missing",
        DEBUG + ('[[optimizer.param_groups]]\npattern = ".*"\n'),
        "bad.toml: optimizer.param_groups.0: ParamGroupConfig needs optimizer_name.",
    ),
    BadToml(
        "Values",
        "a pattern that takes no parameter",
        DEBUG
        + "[optimizer.param_groups.0]\npattern = 'layers\\.0\\.attn'\noptimizer_name = \"AdamW\"\n",
        (
            "bad.toml: optimizer.param_groups.0.pattern is 'layers\\\\.0\\\\.attn', which takes no "
            "trainable parameter; names are as in layers.0.attention.wq.weight, without names of "
            "wrappers."
        ),
    ),
    BadToml(
        "Values",
        "a parameter that no optimizer takes",
        DEBUG + "[optimizer.param_groups.0]\npattern = 'layers'\n",
        (
            "bad.toml: optimizer.param_groups: no group takes tok_embeddings.weight and 2 more; "
            'expected every trainable parameter in a group: add a last one with pattern ".*".'
        ),
    ),
    BadToml(
        "Values",
        "a key that an optimizer does not have",
        DEBUG + "[optimizer.param_groups.0.optimizer_kwargs]\nwieght_decay = 0.0\n",
        (
            "bad.toml: optimizer.param_groups.0.optimizer_kwargs.wieght_decay: AdamW has "
            "no such key; expected one of lr, betas, eps, weight_decay, amsgrad, "
            "maximize, foreach, capturable, differentiable, fused; did you mean "
            "'weight_decay'?"
        ),
    ),
    BadToml(
        "Values",
        "a state that no checkpoint has",
        DEBUG + '[checkpoint]\nexclude_from_loading = ["dataloder"]\n',
        (
            "bad.toml: checkpoint.exclude_from_loading has 'dataloder'; expected names of "
            "dataloader, lr_scheduler, optimizer, train_state; did you mean 'dataloader'?"
        ),
    ),
    BadToml(
        "Values",
        "a module to keep that is not there",
        DEBUG + '[parallelism]\nfsdp_replicate = ["routers"]\n',
        (
            "bad.toml: parallelism.fsdp_replicate: this model has no "
            "'routers'; expected router, norms, adapters, or a pattern for names of modules or "
            "parameters such as layers.3.attention.wkv_a; did you mean 'router'?"
        ),
    ),
    BadToml(
        "Values",
        "a schedule that would lose gradients",
        DEBUG
        + "[parallelism]\npipeline_parallel_degree = 2\n"
        + 'pipeline_parallel_schedule = "ZBVZeroBubble"\n'
        + '[activation_checkpoint]\npolicy = "full"\n',
        (
            "bad.toml: parallelism.pipeline_parallel_schedule is 'ZBVZeroBubble', which splits "
            "backward: with the chunked loss the last norm would get no gradient. Expected another "
            "loss (torchtitan.components.loss.CrossEntropyLoss), or another schedule (1F1B, "
            "Interleaved1F1B)."
        ),
    ),
    BadToml(
        "Values",
        "a value that Titan refuses",
        DEBUG + ('[parallelism]\ncontext_parallel_load_balancer = ""\n'),
        (
            "bad.toml: parallelism: context_parallel_load_balancer cannot be an empty string. Use"
            " None to disable load balancing."
        ),
    ),
    BadToml(
        "Values",
        "a combination that Titan refuses",
        DEBUG + ("[debug]\nbatch_invariant = true\n"),
        "bad.toml: Batch-invariant mode is not supported in pre-training.",
    ),
    BadToml(
        "Values",
        "an SPMD backend that we refuse",
        DEBUG + ('[parallelism]\nspmd_backend = "full_dtensor"\n'),
        (
            "bad.toml: parallelism.spmd_backend is 'full_dtensor', which titan_ext "
            "does not support (TorchTitan removed it after 0.3); expected one of spmd_types, "
            "partial_dtensor."
        ),
    ),
    BadToml(
        "Several mistakes",
        "keys and values",
        DEBUG
        + (
            'dump_foler = "out"\n[training]\nseq_length = 4096\nsteps = "many"\n'
            '[optimizer.param_groups.1]\npattern = ".*"\n[model]\nflavour = "16B"\n'
            '[activation_checkpoint]\npolicy = "fp9"\n'
        ),
        (
            "bad.toml: 6 mistakes:\n"
            "  dump_foler: no such key of Trainer; did you mean 'dump_folder'?\n"
            "  training.seq_length: no such key of TrainingConfig; did you mean 'seq_len'?\n"
            '  training.steps: expected a valid integer, got "many".\n'
            "  optimizer.param_groups.1: no such item: optimizer.param_groups has 1, counted from "
            "0.\n"
            "  activation_checkpoint.policy: no policy is called \"fp9\"; did you mean 'fp8'?\n"
            "  model.flavour: torchtitan.models.deepseek_v3.model_registry does not take it; did "
            "you mean 'flavor'?"
        ),
    ),
    BadToml(
        "Several mistakes",
        "in two files",
        'extends = "base.toml"\n[training]\nsteps = 1.5\n',
        (
            "base.toml: 2 mistakes:\n"
            "  base.toml: training.seq_len: expected a valid integer, got true.\n"
            "  bad.toml: training.steps: expected a valid integer, got 1.5."
        ),
        files={"base.toml": DEBUG + "[training]\nseq_len = true\n"},
    ),
    BadToml(
        "Several mistakes",
        "more than ten",
        DEBUG + "[debug]\n" + "".join(f"seed_{i} = 1\n" for i in range(12)),
        "bad.toml: 12 mistakes:\n"
        + "".join(
            f"  debug.seed_{i}: no such key of DebugConfig; did you mean 'seed'?\n"
            for i in range(10)
        )
        + "  ... and 2 more",
    ),
    BadToml(
        "Several mistakes",
        "combinations",
        DEBUG
        + (
            '[parallelism]\nspmd_backend = "full_dtensor"\n'
            '[checkpoint]\nexclude_from_loading = ["dataloder"]\n'
            '[activation_checkpoint]\npolicy = "memory_budget"\n'
        ),
        (
            "bad.toml: 3 mistakes:\n"
            "  checkpoint.exclude_from_loading has 'dataloder'; expected names of dataloader, "
            "lr_scheduler, optimizer, train_state; did you mean 'dataloader'?\n"
            "  parallelism.spmd_backend is 'full_dtensor', which titan_ext does not support "
            "(TorchTitan removed it after 0.3); expected one of spmd_types, partial_dtensor.\n"
            "  Memory budget activation checkpointing requires the model to be compiled: set "
            "--compile.enable and include 'model' in --compile.components."
        ),
    ),
    BadToml(
        "Values and degrees that no run can have",
        "values out of their range",
        DEBUG
        + (
            'dump_folder = ""\n[training]\nlocal_batch_size = 0\nglobal_batch_size = 0\n'
            "seq_len = 0\nsteps = -10\nmax_norm = -1\n[metrics]\nlog_freq = 0\n"
            "[lr_scheduler]\ndecay_ratio = 3.0\n"
        ),
        (
            "bad.toml: 8 mistakes:\n"
            "  dump_folder is ''; expected at least 1 character.\n"
            "  training.local_batch_size is 0; expected 1 or more.\n"
            "  training.global_batch_size is 0; expected 1 or more, or -1.\n"
            "  training.seq_len is 0; expected 1 or more.\n"
            "  training.steps is -10; expected 1 or more.\n"
            "  training.max_norm is -1; expected greater than 0.\n"
            "  lr_scheduler.decay_ratio is 3.0; expected at most 1.\n"
            "  metrics.log_freq is 0; expected 1 or more."
        ),
    ),
    BadToml(
        "Values and degrees that no run can have",
        "values of the optimizer",
        DEBUG + "[optimizer.param_groups.0.optimizer_kwargs]\nlr = nan\nbetas = [0.9]\n",
        (
            "bad.toml: 2 mistakes:\n"
            "  optimizer.param_groups.0.optimizer_kwargs.lr is nan; expected a finite number.\n"
            "  optimizer.param_groups.0.optimizer_kwargs.betas is (0.9,); expected at least 2 "
            "items."
        ),
    ),
    BadToml(
        "Values and degrees that no run can have",
        "a negative learning rate",
        DEBUG + "[optimizer.param_groups.0.optimizer_kwargs]\nlr = -1e-4\n",
        "bad.toml: optimizer.param_groups.0.optimizer_kwargs.lr is -0.0001; expected 0 or more.",
    ),
    BadToml(
        "Values and degrees that no run can have",
        "a degree of 0",
        DEBUG + "[parallelism]\nexpert_parallel_degree = 0\n",
        "bad.toml: parallelism.expert_parallel_degree is 0; expected 1 or more.",
    ),
    BadToml(
        "Values and degrees that no run can have",
        "more EP than experts",
        DEBUG + "[parallelism]\nexpert_parallel_degree = 16\n",
        (
            "bad.toml: parallelism.expert_parallel_degree is 16; it has to divide 8, the number "
            "of experts; expected one of 1, 2, 4, 8."
        ),
    ),
    BadToml(
        "Values and degrees that no run can have",
        "more EP than shards",
        DEBUG
        + (
            "[parallelism]\ndata_parallel_replicate_degree = 4\ndata_parallel_shard_degree = 4\n"
            "expert_parallel_degree = 8\n"
        ),
        (
            "bad.toml: parallelism.expert_parallel_degree is 8; it has to divide 4, the ranks of "
            "one pipeline stage in one replica (FSDP shards x CP x TP); expected one of 1, 2, 4."
        ),
    ),
    BadToml(
        "Values and degrees that no run can have",
        "a batch that the ranks cannot share",
        DEBUG
        + ("[training]\nglobal_batch_size = 12\n[parallelism]\ndata_parallel_shard_degree = 4\n"),
        (
            "bad.toml: training.global_batch_size is 12; expected a multiple of 32: "
            "training.local_batch_size 8 x 4 data-parallel ranks."
        ),
    ),
    BadToml(
        "Values and degrees that no run can have",
        "experts that no collective carries alone",
        DEBUG + '[parallelism]\nfsdp_expert_all_gather = "float8"\n',
        (
            "bad.toml: parallelism.fsdp_expert_all_gather needs "
            'parallelism.expert_parallel_degree > 1 or parallelism.fsdp_wrap = "experts": with '
            'fsdp_wrap = "auto" and without expert parallelism one collective carries the '
            "experts and the parameters around them."
        ),
    ),
    BadToml(
        "Values and degrees that no run can have",
        "nothing frozen to quantize",
        DEBUG
        + (
            '[parallelism]\nfsdp_quantize_frozen = "nf4"\n'
            'fsdp_quantize_frozen_modules = ["linears"]\n'
        ),
        (
            "bad.toml: parallelism.fsdp_quantize_frozen quantizes frozen linears, and this model "
            "has none; expected LoRA adapters (docs/lora.md), which freeze the others, or no such "
            "key."
        ),
    ),
    BadToml(
        "Values and degrees that no run can have",
        "float8 asked for and exempted everywhere",
        DEBUG + '[activation_checkpoint]\npolicy = "fp8"\nexempt = ["layers.*"]\n',
        (
            "bad.toml: activation_checkpoint.exempt is ['layers.*'], which takes all 6 blocks: "
            'nothing would be stored in float8. Expected fewer, or policy "selective".'
        ),
    ),
    BadToml(
        "Values and degrees that no run can have",
        "a budget for activations that is no size",
        DEBUG + '[activation_checkpoint]\npolicy = "fp8"\nbudget = "20"\n',
        (
            "bad.toml: activation_checkpoint: activation_checkpoint.budget is '20'; expected a "
            'size such as "20GiB" (units KiB, MiB, GiB, KB, MB, GB), "fit" for what the '
            'device\'s memory leaves, or "fit 80GiB".'
        ),
    ),
    BadToml(
        "Values and degrees that no run can have",
        "a budget and a table",
        DEBUG
        + '[activation_checkpoint]\npolicy = "fp8"\nbudget = "20GiB"\n'
        + 'op_policies = {"attention" = "save"}\n',
        (
            "bad.toml: activation_checkpoint: activation_checkpoint.budget is '20GiB', for which "
            "the run finds activation_checkpoint.op_policies; activation_checkpoint.op_policies "
            "is {'attention': 'save'}. Expected no op_policies, or no budget."
        ),
    ),
    BadToml(
        "Values and degrees that no run can have",
        "a budget in a mode without operations",
        DEBUG + '[activation_checkpoint]\npolicy = "fp8"\nmode = "no_recompute"\nbudget = "1GiB"\n',
        (
            "bad.toml: activation_checkpoint: activation_checkpoint.budget is '1GiB', for which "
            "the run finds activation_checkpoint.op_policies; activation_checkpoint.mode is "
            "'no_recompute'. Expected mode = \"selective\", or no budget."
        ),
    ),
    BadToml(
        "Policies and components",
        "an unknown policy",
        DEBUG + ('[activation_checkpoint]\npolicy = "ful"\n'),
        (
            'bad.toml: activation_checkpoint.policy: no policy is called "ful"; did you '
            "mean 'full'?"
        ),
    ),
    BadToml(
        "Policies and components",
        "a key of another policy",
        DEBUG + ('[activation_checkpoint]\npolicy = "full"\nmemory_budget = 0.5\n'),
        (
            "bad.toml: activation_checkpoint.memory_budget: no such key of FullAC; "
            "expected one of debug, determinism_check, preserve_rng_state."
        ),
    ),
    BadToml(
        "Policies and components",
        "a key without a policy",
        DEBUG + ('[activation_checkpoint]\npolicy = "none"\ndebug = true\n'),
        (
            "bad.toml: activation_checkpoint.debug: has no meaning: "
            'activation_checkpoint.policy is "none".'
        ),
    ),
    BadToml(
        "Policies and components",
        "a policy in place of its section",
        DEBUG + 'activation_checkpoint = "full"\n',
        (
            "bad.toml: activation_checkpoint: expected a table [activation_checkpoint] "
            'with policy = ..., got "full".'
        ),
    ),
    BadToml(
        "Policies and components",
        "a component that does not exist",
        DEBUG
        + (
            "[dataloader]\n"
            'component = "torchtitan.hf_datasets.text_datasets.HuggingFaceTextDataLoaders"\n'
        ),
        (
            "bad.toml: dataloader.component: torchtitan.hf_datasets.text_datasets has no "
            "HuggingFaceTextDataLoaders; did you mean 'HuggingFaceTextDataLoader'?"
        ),
    ),
    BadToml(
        "Policies and components",
        "a component of the wrong kind",
        DEBUG + ('[dataloader]\ncomponent = "torchtitan.components.loss.MSELoss"\n'),
        (
            "bad.toml: dataloader.component: expected a kind of BaseDataLoader, but "
            "torchtitan.components.loss.MSELoss is none."
        ),
    ),
    BadToml(
        "Policies and components",
        "a component without its module",
        DEBUG + ('[dataloader]\ncomponent = "ChatDataLoader"\n'),
        (
            "bad.toml: dataloader.component: expected a dotted path, as in "
            "\"package.module.Name\", got 'ChatDataLoader'."
        ),
    ),
    BadToml(
        "Policies and components",
        "a component in a module that does not exist",
        DEBUG + ('[dataloader]\ncomponent = "my_package.data.Loader"\n'),
        "bad.toml: dataloader.component: no module named my_package; is it on PYTHONPATH?",
    ),
    BadToml(
        "Policies and components",
        "a class for a section that has no choice",
        DEBUG + ('[training]\ncomponent = "my_package.Training"\n'),
        (
            "bad.toml: training.component: [training] has one class only; there is nothing to "
            "choose."
        ),
    ),
    BadToml(
        "The model",
        "an unknown flavor",
        DEBUG + ('[model]\nflavor = "16b"\n'),
        "bad.toml: model.flavor: \"16b\" is unknown; did you mean '16B'?",
    ),
    BadToml(
        "The model",
        "an unknown model choice",
        DEBUG + ('[model]\nattention_backend = "flex"\n'),
        (
            "bad.toml: model.attention_backend: "
            "torchtitan.models.deepseek_v3.model_registry does not take it; did you mean "
            "'attn_backend'?"
        ),
    ),
    BadToml(
        "The model",
        "a choice of another model",
        ('extends = "qwen3.qwen3_moe_debug"\n[model]\nnum_mtp_layers = 1\n'),
        (
            "bad.toml: model.num_mtp_layers: torchtitan.models.qwen3.model_registry does "
            "not take it; expected one of attn_backend, converters, flavor, "
            "moe_comm_backend."
        ),
    ),
    BadToml(
        "The model",
        "an unknown attention backend",
        DEBUG + ('[model]\nattn_backend = "flexx"\n'),
        "bad.toml: model.attn_backend: \"flexx\" is unknown; did you mean 'flex'?",
    ),
    BadToml(
        "The model",
        "an unknown EP communication backend",
        DEBUG + ('[model]\nmoe_comm_backend = "deep_ep"\n'),
        ("bad.toml: model.moe_comm_backend: \"deep_ep\" is unknown; did you mean 'deepep'?"),
    ),
    BadToml(
        "The model",
        "a string for a number of layers",
        DEBUG + ('[model]\nnum_mtp_layers = "1"\n'),
        'bad.toml: model.num_mtp_layers: expected a valid integer, got "1".',
    ),
    BadToml(
        "The model",
        "an unknown converter",
        DEBUG
        + (
            "[[model.converters]]\n"
            'component = "torchtitan.components.quantization.Float8Converter"\n'
        ),
        (
            "bad.toml: model.converters.0.component: torchtitan.components.quantization "
            "has no Float8Converter; did you mean 'Float8LinearConverter'?"
        ),
    ),
    BadToml(
        "The model",
        "an unknown key of a converter",
        DEBUG
        + (
            "[[model.converters]]\n"
            'component = "torchtitan.components.lora.LoRAConverter"\n'
            "rnk = 8\n"
        ),
        ("bad.toml: model.converters.0.rnk: no such key of LoRAConverter; did you mean 'rank'?"),
    ),
    BadToml(
        "The model",
        "a converter that refuses its values",
        DEBUG
        + (
            "[[model.converters]]\n"
            'component = "torchtitan.components.lora.LoRAConverter"\n'
            "rank = 0\n"
        ),
        (
            "bad.toml: model: torchtitan.models.deepseek_v3.model_registry refuses it: LoRA rank "
            "must be positive, got 0"
        ),
    ),
    BadToml(
        "Files of TorchTitan 0.1 and 0.2",
        "a whole file of TorchTitan 0.2",
        (
            "[job]\n"
            'dump_folder = "./outputs"\n'
            "[model]\n"
            'name = "deepseek_v3"\n'
            'flavor = "16B"\n'
            "[training]\n"
            "local_batch_size = 4\n"
        ),
        (
            "bad.toml: extends: missing; this looks like a file for TorchTitan 0.1 or 0.2. In "
            "place of [model] name, say first which config function it changes, as in extends = "
            '"deepseek_v3.deepseek_v3_16b".'
        ),
    ),
    BadToml(
        "Keys of TorchTitan's main branch",
        "a batch size in tokens",
        DEBUG + ("[training]\nnum_tokens_per_microbatch_per_dp_rank = 16384\n"),
        (
            "bad.toml: training.num_tokens_per_microbatch_per_dp_rank: TorchTitan main's name, "
            "which counts tokens; TorchTitan 0.3 has training.local_batch_size, which counts "
            "sequences: write the number of tokens divided by training.seq_len."
        ),
    ),
    BadToml(
        "Keys of TorchTitan's main branch",
        "a global batch size in tokens",
        DEBUG + ("[training]\nnum_tokens_per_train_step = 1048576\n"),
        (
            "bad.toml: training.num_tokens_per_train_step: TorchTitan main's name, which counts "
            "tokens; TorchTitan 0.3 has training.global_batch_size, which counts sequences: write"
            " the number of tokens divided by training.seq_len."
        ),
    ),
    BadToml(
        "Keys of TorchTitan's main branch",
        "a number of pipeline microbatches",
        DEBUG + ("[parallelism]\nnum_pp_microbatches = 4\n"),
        (
            "bad.toml: parallelism.num_pp_microbatches: TorchTitan main's name, which counts "
            "microbatches; TorchTitan 0.3 has parallelism.pipeline_parallel_microbatch_size, "
            "which counts sequences in one: write training.local_batch_size divided by the number"
            " of microbatches."
        ),
    ),
    BadToml(
        "Keys of TorchTitan's main branch",
        "a wrong value under a name of main",
        DEBUG + '[training]\nmax_context_length = "4096"\n',
        'bad.toml: training.max_context_length: expected a valid integer, got "4096".',
    ),
    BadToml(
        "Keys of TorchTitan's main branch",
        "a key under both of its names",
        DEBUG + ("[training]\nmax_context_length = 4096\nseq_len = 4096\n"),
        (
            "bad.toml: training.max_context_length: is another name of training.seq_len, and both"
            " are given."
        ),
    ),
)
