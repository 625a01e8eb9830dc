"""The package as a whole: light to import, complete, and its README's examples run."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import jdlite
from tests.tiny_target import save_tiny_target

ROOT = Path(__file__).parents[1]
HEAVY = ("jax", "jaxlib", "flax", "transformers", "numpy", "torch", "matplotlib", "orbax")


def python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("module", ["jdlite", "jdlite.cli", "jdlite.generate", "jdlite.evaluation.demo"])
def test_importing_is_light(module):
    assert python(f"import sys, {module}; print([m for m in {HEAVY!r} if m in sys.modules])") == "[]"


def test_importing_everything_public_touches_no_device():
    code = (
        "import jdlite\n"
        "for name in jdlite.__all__: getattr(jdlite, name)\n"
        "from jax._src import xla_bridge\n"
        "print(xla_bridge.backends_are_initialized())"
    )
    assert python(code) == "False"


def test_a_wrong_name_is_answered_with_the_right_ones():
    with pytest.raises(AttributeError, match=r"has no attribute 'decod'; it has: .*decode"):
        jdlite.decod  # noqa: B018
    assert "decode" in dir(jdlite)


def tracked() -> list[Path]:
    done = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip("not a git checkout")
    return [ROOT / name for name in done.stdout.split("\0") if name and (ROOT / name).is_file()]


def test_no_machine_path_and_no_registry_host():
    # In pieces, so that this file does not name them.
    hosts = [f"{name}.{end}" for name, end in (("pypi", "org"), ("pythonhosted", "org"), ("npmjs", "org"))]
    paths = [f"/{name}/" for name in ("work", "root", "home", "Users")]
    pattern = re.compile("|".join(re.escape(word) for word in [*hosts, *paths, "file:" + "//"]).encode())
    found = []
    for path in tracked():
        if path.suffix in (".safetensors", ".npz", ".png"):
            continue
        found += [f"{path.relative_to(ROOT)}: {m.group().decode()}" for m in pattern.finditer(path.read_bytes())]
    assert not found


def test_constraints_are_plain_pins_of_what_the_project_asks_for():
    import tomllib

    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines())
    assert all(
        re.fullmatch(r"[A-Za-z0-9._-]+", name) and re.fullmatch(r"[0-9][0-9a-z.]*", v) for name, v in pins.items()
    )
    normal = {re.sub(r"[-_.]+", "-", name).lower() for name in pins}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    for wanted in [*project["dependencies"], *extras["test"], *extras["parity"]]:
        name = re.match(r"[A-Za-z0-9._-]+", wanted)
        assert name is not None
        assert re.sub(r"[-_.]+", "-", name.group()).lower() in normal, wanted


def test_version_is_that_of_the_project():
    assert f'version = "{jdlite.__version__}"' in (ROOT / "pyproject.toml").read_text()


def examples() -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(encoding="utf-8"), re.M | re.S)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny_target(tmp_path_factory.mktemp("target") / "hf")


@pytest.mark.slow  # AdaPLD's five widths are compiled in each
@pytest.mark.parametrize("index", range(3))
def test_readme_examples_run(index, folder, monkeypatch, capsys):
    """As they stand, with a tiny target in the place of the demo target."""
    monkeypatch.setattr("jdlite.checkpoints.demo.fetch_demo_target", lambda: folder)
    blocks = examples()
    assert len(blocks) == 3
    names: dict = {}
    exec(compile(blocks[index], f"README.md example {index + 1}", "exec"), names)
    assert capsys.readouterr().out.strip()
    if index == 1:  # the example for jit gives what decode() gives
        prompts = [[5, 6, 7, 5, 6], [8, 9]]
        target = jdlite.Target(model=names["model"], eos_ids=(1,))
        wanted = jdlite.decode(target, prompts, drafter="plain", max_new_tokens=40, capacity=256)
        out, lengths = names["out"], names["lengths"]
        got = [out[b, len(p) : lengths[b]].tolist() for b, p in enumerate(prompts)]
        assert got == wanted.tokens


def test_documents_link_to_what_exists():
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        for link in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")):
            assert link.startswith("http") or (page.parent / link).exists(), f"{page.name}: {link}"
