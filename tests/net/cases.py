"""The commands that compare.py runs in both environments.

A case runs in a separate folder, where `inputs` holds the files of inputs.py, and
`cases/GROUP/NAME` the files of an earlier case, which therefore runs first.
"""

import shlex
import textwrap
from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    """One or several commands that run one after the other.

    Args:
        id: Group and name, such as "convert/griffin-to-hf".
        commands: Command lines in shell syntax; `{net}` is the folder of this file.
        exit: Expected exit code of the last command.
        only_exit: Whether only exit codes are compared.
        timeout: Limit in seconds for each command.
        dropped: Regular expressions of text lines to leave out.
        dropped_keys: Additional JSON keys to leave out.
        loose: Whether runs of spaces and of table borders count as one character.
    """

    id: str
    commands: tuple[str, ...]
    exit: int = 0
    only_exit: bool = False
    timeout: float = 600
    dropped: tuple[str, ...] = ()
    dropped_keys: tuple[str, ...] = ()
    loose: bool = False


def case(id: str, *commands: str, **options) -> Case:
    return Case(id, commands, **options)


def script(code: str) -> str:
    """Return a command that runs Python code."""
    return f"python -c {shlex.quote(textwrap.dedent(code))}"


IN = "inputs"
SUMS = "python {net}/orbax_sums.py"

CHECKPOINTS = [
    case(  # the title holds the package's path and is wrapped
        "checkpoints/list",
        "griffin-eval checkpoints",
        dropped=("<package>|each has a card|^ *in *$",),
        loose=True,
    ),
    case(
        "checkpoints/files",
        script("""
            import hashlib, pathlib
            from griffin_eval.checkpoints import folder
            for name in ("bytes_griffin", "phonebook_griffin", "selective_copy_hawk"):
                for path in sorted(pathlib.Path(folder(name)).iterdir()):
                    print(name, path.name, hashlib.sha256(path.read_bytes()).hexdigest())
        """),
    ),
]

CONVERT = [
    case("convert/griffin-to-hf", f"griffin-eval convert {IN}/bytes out --to hf"),
    case(
        "convert/griffin-to-orbax",
        f"griffin-eval convert {IN}/bytes out --to griffin-orbax",
        f"{SUMS} out",
    ),
    case("convert/hf-to-griffin", f"griffin-eval convert {IN}/plain out --to griffin"),
    case(
        "convert/hf-to-orbax",
        f"griffin-eval convert {IN}/plain out --to griffin-orbax",
        f"{SUMS} out",
    ),
    case(
        "convert/hf-to-flax",
        f"griffin-eval convert {IN}/plain out --to deepmind-flax",
        f"{SUMS} out",
    ),
    case("convert/hf-to-pt", f"griffin-eval convert {IN}/plain out --to deepmind-torch"),
    case("convert/orbax-to-hf", "griffin-eval convert cases/convert/hf-to-orbax/out out --to hf"),
    case(
        "convert/flax-to-griffin",
        "griffin-eval convert cases/convert/hf-to-flax/out out --to griffin",
    ),
    case("convert/pt-to-hf", "griffin-eval convert cases/convert/hf-to-pt/out out --to hf"),
    case(
        "convert/hawk-to-orbax",
        f"griffin-eval convert {IN}/hawk out --to griffin-orbax",
        f"{SUMS} out",
    ),
    case("convert/bfloat16", f"griffin-eval convert {IN}/model out --to hf --dtype bfloat16"),
    case(
        "convert/dtypes",
        f"griffin-eval convert {IN}/model out --to griffin"
        " --dtype float16,recurrent_param=bfloat16",
    ),
    case("convert/shards", f"griffin-eval convert {IN}/model out --to hf --max-shard-size 500KB"),
    case("convert/from-shards", "griffin-eval convert cases/convert/shards/out out --to griffin"),
    case(
        "convert/chunks",
        f"griffin-eval convert {IN}/model out --to griffin-orbax --chunks model=2,data=2",
        f"{SUMS} out",
    ),
    case("convert/vocab-size", f"griffin-eval convert {IN}/plain out --to hf --vocab-size 259"),
    case(
        "convert/dry-run",
        f"griffin-eval convert {IN}/model out --to deepmind-flax --dtype bfloat16 --dry-run",
    ),
    case("convert/overwrite", *2 * (f"griffin-eval convert {IN}/model out --to hf --overwrite",)),
    case("convert/no-check", f"griffin-eval convert {IN}/tampered out --to griffin --no-check"),
    case("convert/adapter", f"griffin-eval convert {IN}/plain out --to hf --adapter {IN}/adapter"),
    case(
        "convert/two-adapters",
        f"griffin-eval convert {IN}/bytes out --to griffin --adapter {IN}/adapter=0.7"
        f" --adapter {IN}/adapter=-0.3",
    ),
    case(
        "convert/names-table",
        f"griffin-eval convert {IN}/foreign out --to hf --names {IN}/names.toml",
    ),
    case("convert/gguf", f"griffin-eval convert {IN}/gguf/model.gguf out --to hf"),
    case("convert/help-formats", "griffin-eval convert --help-formats"),
    case("convert/quantised", f"griffin-eval convert {IN}/quantised out --to griffin"),
    case(
        "convert/without-config",
        f"griffin-eval convert {IN}/flax-alone out --to hf --visible-keys 256 --embedding-scale"
        " --logits-soft-cap 30",
    ),
]

INSPECT = [
    case("inspect/hf", f"griffin-eval inspect {IN}/model"),
    case("inspect/hf-json", f"griffin-eval inspect {IN}/model --json"),
    case("inspect/orbax-json", f"griffin-eval inspect {IN}/orbax --json"),
    case("inspect/pt", "griffin-eval inspect cases/convert/hf-to-pt/out"),
    case("inspect/gguf", f"griffin-eval inspect {IN}/gguf/model.gguf"),
    case("inspect/quantised", f"griffin-eval inspect {IN}/quantised"),
    case("inspect/names-table", f"griffin-eval inspect {IN}/foreign --names {IN}/names.toml"),
    case("inspect/devices", f"griffin-eval inspect {IN}/model --devices 2"),
    case("inspect/misshaped", f"griffin-eval inspect {IN}/misshaped --json", exit=1),
    case("verify/manifest", f"griffin-eval verify {IN}/model"),
    case(
        "verify/two-formats",
        "griffin-eval verify cases/convert/hf-to-orbax/out cases/convert/hf-to-pt/out",
    ),
    case("verify/differ", f"griffin-eval verify {IN}/plain {IN}/tampered", exit=1),
    case(
        "verify/logits",
        f"griffin-eval verify {IN}/heads {IN}/training/checkpoint-100 --logits",
        dropped=("deepmind|recurrentgemma",),
        loose=True,
    ),
]

TASKS = "griffin_pydoc_choice,griffin_pydoc_rolling,griffin_phonebook"
SHORT = """--limit 3 --metadata '{"entries": [4, 8], "samples": 2, "queries": 2}'"""
LM_EVAL = "lm_eval --model griffin --log_samples"

EVALUATE = [
    case(
        "evaluate/torch",
        f"{LM_EVAL} --model_args pretrained={IN}/model,framework=torch --tasks {TASKS} {SHORT}"
        " --output_path results",
    ),
    case(
        "evaluate/jax",
        f"{LM_EVAL} --model_args pretrained={IN}/model,framework=jax,token_scores=scores"
        f" --tasks {TASKS} {SHORT}"
        " --output_path results",
    ),
    case(
        "evaluate/cache-and-batch",
        *2
        * (
            f"{LM_EVAL} --model_args pretrained={IN}/bytes,framework=torch"
            " --tasks griffin_pydoc_choice --limit 2"
            " --batch_size 4 --use_cache answers --output_path results",
        ),
    ),
    case(
        "evaluate/state",
        f"{LM_EVAL}"
        f" --model_args pretrained={IN}/model,framework=torch,state=cases/read/torch/book.state"
        " --tasks griffin_pydoc_choice --limit 2 --output_path results",
    ),
    case(
        "evaluate/suite",
        f"griffin-eval run --model griffin --model_args pretrained={IN}/model,framework=torch"
        " --tasks griffin_pydoc_choice --limit 2 --freeze suite.json",
        f"griffin-eval run --model griffin --model_args pretrained={IN}/plain,framework=torch"
        " --suite suite.json"
        " --log_samples --output_path again",
    ),
    case(
        "evaluate/sweep",
        f"griffin-eval sweep {IN}/training --tasks griffin_induction_heads -o sweep"
        " --model_args framework=torch"
        """ --metadata '{"lengths": [8, 16], "samples": 2}'""",
    ),
    case(
        "evaluate/report",
        "griffin-eval report cases/evaluate/torch/results cases/evaluate/jax/results"
        " --output report",
    ),
    case(
        "evaluate/report-against",
        "griffin-eval report cases/evaluate/jax/results --against cases/evaluate/torch/results"
        " --output report",
    ),
]

SCORE = [
    case(
        "score/table",
        f"griffin-eval score {IN}/model {IN}/texts/code.txt {IN}/texts/book.txt --framework torch",
    ),
    case(
        "score/csv-torch",
        f"griffin-eval score {IN}/model {IN}/texts/code.txt --csv --framework torch"
        " --states states",
    ),
    case(
        "score/csv-jax", f"griffin-eval score {IN}/model {IN}/texts/code.txt --csv --framework jax"
    ),
    case(
        "score/words",
        f"griffin-eval score {IN}/bytes {IN}/texts/code.txt --lines --csv --words"
        " --framework torch",
    ),
    case(
        "read/torch",
        f"griffin-eval read {IN}/model {IN}/texts/book.txt --save book.state --framework torch",
    ),
    case(
        "read/jax-chat",
        f"griffin-eval read {IN}/model {IN}/texts/book.txt --save book.state --framework jax --chat"
        f" --chat-template {IN}/texts/template.jinja",
    ),
    case(
        "score/tampered",
        f"griffin-eval score {IN}/tampered {IN}/texts/code.txt --framework torch",
        exit=2,
    ),
    case("memory/without-recurrence", f"griffin-eval memory {IN}/mqa --tokens 0"),
    case("memory/json", f"griffin-eval memory {IN}/model --json --tokens 200 --framework torch"),
    case("memory/table", f"griffin-eval memory {IN}/hawk --tokens 0 --output figures"),
    case(
        "serve/answers",
        "python {net}/ask_server.py"
        f" {IN}/model --served-model-name bytes --framework torch --max-length 1000"
        " --chat-template plain"
        " --state cases/read/torch/book.state",
    ),
    case(
        "train/three-steps",
        "griffin-eval train induction_heads --model griffin --length 16 --rows 4 --steps 3"
        " --output run",
        "griffin-eval convert run trained --to griffin",
        "griffin-eval inspect run --json",
    ),
    case("doctor/exit-code", "griffin-eval doctor", only_exit=True),
    case("help/version", "griffin-eval --version", only_exit=True),
    *(
        case(f"help/{name}", f"griffin-eval {name} --help", only_exit=True)
        for name in ("run", "convert", "train")
    ),
]

API = [
    *(
        case(
            f"python/logits-{framework}",
            script(f"""
                import hashlib
                import numpy as np
                import griffin_eval
                model = griffin_eval.load("{IN}/model", framework="{framework}")
                if "{framework}" == "torch":
                    import torch as xp
                else:
                    import jax.numpy as xp
                tokens = xp.asarray([[2, 100, 101, 102, 103], [2, 50, 51, 0, 0]])
                hidden, state = model.step(tokens, xp.asarray([5, 3]), model.init_state(batch=2))
                logits = model.logits(hidden)
                logits = logits.detach().numpy() if "{framework}" == "torch" else np.asarray(logits)
                digest = hashlib.sha256(logits[:, :3].tobytes()).hexdigest()
                print(logits.dtype, logits.shape, digest)
                print(logits[:, :3, :6].tolist(), state.pos)
            """),
        )
        for framework in ("torch", "jax")
    ),
    *(
        case(
            f"python/evaluator-{framework}",
            script(f"""
                import griffin_eval
                model = griffin_eval.Evaluator("{IN}/model", framework="{framework}")
                texts = ["import os", "import os\\nimport sys", [2, 7, 9]]
                for score in model.score(texts, details=True):
                    print(score.tokens, score.logprobs.tolist(), score.greedy, score.total)
                    print(score.ranks, score.entropies)
                for answer in model.generate(["def ", [2, 103, 104]], max_new_tokens=8):
                    print(repr(answer.text), answer.tokens)
                [answer] = model.generate(["def "], max_new_tokens=8, temperature=0.7, seed=1)
                print(repr(answer.text), answer.tokens)
            """),
        )
        for framework in ("torch", "jax")
    ),
    case(
        "python/quantised",
        script("""
            import griffin_eval
            model = griffin_eval.Evaluator("inputs/quantised", framework="torch", load="quantised")
            print([score.logprobs.tolist() for score in model.score(["import os"])])
            print(model.generate(["def "], max_new_tokens=8)[0].tokens)
        """),
    ),
    case(
        "python/convert-and-verify",
        script(f"""
            import griffin_eval
            checkpoint = griffin_eval.open_checkpoint("{IN}/bytes")
            print(checkpoint.format.name, checkpoint.config, sorted(checkpoint.dtypes.items())[:3])
            print(checkpoint.numpy("model.embed_tokens.weight").astype("f4")[:2].tolist())
            griffin_eval.convert(checkpoint, "copy", to="hf", dtype="float32")
            result = griffin_eval.verify(checkpoint, "copy")
            print(result.same, len(result.tensors), result.compared, result.config)
            print(griffin_eval.verify("copy", "{IN}/model").same, griffin_eval.PRESETS)
        """),
    ),
    case(
        "python/states",
        script(f"""
            import griffin_eval
            model = griffin_eval.Evaluator("{IN}/model", framework="torch")
            model.read("The secret word is heliotrope.").save("secret.state")
            after = griffin_eval.Evaluator("{IN}/model", framework="torch", state="secret.state")
            print(after.generate(["The secret word is"], max_new_tokens=12)[0].tokens)
            print(after.score([" heliotrope"])[0].logprobs.tolist())
            layers = model.layer_states("import os")
            for name, array in sorted(layers.items()):
                print(name, array.shape, float(array.sum()))
        """),
    ),
]

ARGUMENTS = [
    {"dtype": "float31"},
    {"framework": "pytorch"},
    {"device": "cua:0"},
    {"batch_size": "many"},
    {"max_length": -1},
    {"add_bos_token": "no"},
    {"max_lenght": 5},
    {"parallelize": True},
    {"trust_remote_code": True},
    {"prefix_token_id": 5000},
    {"softmax_dtype": "f32"},
    {"tensor_parallel_size": 0},
    {"tensor_parallel_size": "two"},
    {"window": 16, "visible_keys": 32},
    {"pretrained": ""},
    {"peft": "nowhere"},
    {"state": f"{IN}/texts/book.txt"},
    {"state_budget": "lots"},
    {"load": "quantized"},
    {"load": "quantised"},
    {"tokenizer": "/nowhere"},
    {"token_states": True},
    {"parity": "no"},
]


def refused(name: str, command: str, exit: int = 2, **options) -> Case:
    return case(f"refused/{name}", f"griffin-eval {command}", exit=exit, **options)


def cannot_convert(name: str, source: str, options: str = "--to griffin", **more) -> Case:
    return refused(name, f"convert {IN}/{source} out {options}", **more)


SCORED = f"{IN}/texts/code.txt --framework torch"
REFUSED = [
    refused("missing-path", "inspect nowhere"),
    refused("unknown-command", "convrt"),
    refused("missing-argument", f"convert {IN}/model"),
    cannot_convert("no-checkpoint", "texts"),
    cannot_convert("a-text-file", "texts/code.txt"),
    cannot_convert("adapter-alone", "adapter"),
    cannot_convert("another-model-type", "llama"),
    cannot_convert("no-config", "no-config"),
    cannot_convert("unreadable-config", "unreadable"),
    cannot_convert("truncated-safetensors", "truncated"),
    cannot_convert("lying-safetensors", "lying"),
    cannot_convert("misshaped-tensors", "misshaped"),
    cannot_convert("tampered-weights", "tampered"),
    cannot_convert("damaged-manifest", "damaged-manifest"),
    cannot_convert("orbax-cut", "orbax-cut"),
    cannot_convert("orbax-metadata", "orbax-metadata"),
    cannot_convert("hostile-pt", "hostile.pt"),
    cannot_convert("hostile-pickle", "hostile-pickle.pt"),
    cannot_convert("gguf-without-config", "gguf-alone/model.gguf"),
    cannot_convert("flax-without-config", "flax-alone"),
    cannot_convert("foreign-names", "foreign"),
    cannot_convert("wrong-names-table", "foreign", f"--to hf --names {IN}/wrong-names.toml"),
    cannot_convert("unknown-names-table", "foreign", "--to hf --names nemoo"),
    cannot_convert("unknown-format", "model", "--to hff"),
    cannot_convert("unknown-option", "model", "--too hf"),
    cannot_convert("unknown-dtype", "model", "--to hf --dtype float31"),
    cannot_convert("unknown-preset", "model", "--to hf --preset recurrentgemma-3b"),
    cannot_convert("quantize", "model", "--to hf --quantize bnb-nf4"),
    cannot_convert("hawk-as-hf", "hawk", "--to hf"),
    cannot_convert("global-attention-as-pt", "mqa", "--to deepmind-torch"),
    cannot_convert("shard-size", "model", "--to hf --max-shard-size lots"),
    cannot_convert("memory", "model", "--to hf --max-memory 1MB"),
    cannot_convert("resume", "model", "--to hf --resume"),
    cannot_convert("mesh", "model", "--to hf --chunks model=x"),
    cannot_convert("vocab-size", "model", "--to hf --vocab-size 9999"),
    cannot_convert("pissa", "plain", f"--to hf --adapter {IN}/pissa"),
    cannot_convert("push-to-hub", "model", "--to griffin --push-to-hub me/model"),
    case(
        "refused/existing-destination",
        *2 * (f"griffin-eval convert {IN}/model out --to hf",),
        exit=2,
    ),
    refused("verify-without-manifest", f"verify {IN}/plain", exit=2),
    refused("score-dtype", f"score {IN}/model {SCORED} --dtype float31"),
    refused("score-device", f"score {IN}/model {SCORED} --device cua:0"),
    refused("score-framework", f"score {IN}/model {IN}/texts/code.txt --framework tensorflow"),
    refused("score-nan-weights", f"score {IN}/nan {SCORED}"),
    refused("score-without-tokenizer", f"score {IN}/no-tokenizer {SCORED}"),
    refused("score-missing-text", f"score {IN}/model nowhere.txt --framework torch"),
    refused("score-latin-1", f"score {IN}/model {IN}/texts/latin.txt --framework torch"),
    refused(
        "read-broken-template",
        f"read {IN}/model {IN}/texts/book.txt --save s --chat"
        f" --chat-template {IN}/texts/broken.jinja",
    ),
    refused(
        "read-over-another-file", f"read {IN}/model {IN}/texts/book.txt --save {IN}/texts/code.txt"
    ),
    refused(
        "state-of-another-model",
        f"serve {IN}/bytes --framework torch --port 0 --state cases/read/torch/book.state",
    ),
    refused("serve-to-all-without-key", f"serve {IN}/model --host 0.0.0.0"),
    refused(
        "serve-missing-state", f"serve {IN}/model --framework torch --port 0 --state nowhere.state"
    ),
    refused("train-unknown-recipe", "train induction --output run"),
    refused("train-unknown-model", "train induction_heads --model mamba --output run"),
    refused("train-queue", f"train --queue {IN}/texts/queue.jsonl"),
    refused("report-of-nothing", f"report {IN}/texts --output report"),
    refused("sweep-without-steps", f"sweep {IN}/texts --tasks griffin_smoke -o sweep"),
    refused(
        "lm-eval-unknown-argument",
        f"run --model griffin --model_args pretrained={IN}/model,max_lenght=5"
        " --tasks griffin_smoke",
    ),
    refused(
        "lm-eval-unknown-task",
        f"run --model griffin --model_args pretrained={IN}/model --tasks griffin_smokes",
    ),
    refused(
        "lm-eval-tampered-weights",
        f"run --model griffin --model_args pretrained={IN}/tampered,framework=torch"
        " --tasks griffin_pydoc_choice --limit 1 --output_path results",
    ),
    case(
        "refused/model-arguments",
        script(f"""
            import lm_eval.models
            from lm_eval.api.registry import get_model
            usual = {{"pretrained": "{IN}/model", "framework": "torch"}}
            for arguments in {ARGUMENTS!r}:
                try:
                    get_model("griffin")(**usual | arguments)
                    print(arguments, "taken")
                except Exception as error:
                    print(arguments, type(error).__name__, error)
        """),
    ),
]

CASES = [*CHECKPOINTS, *CONVERT, *INSPECT, *SCORE, *EVALUATE, *API, *REFUSED]
