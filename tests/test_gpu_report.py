from __future__ import annotations

import ast
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests import gpu_report

pytest_plugins = ("pytester",)

SUITE = """
    import pytest

    def test_passes(): pass
    def test_fails(): assert False
    @pytest.mark.skip(reason="two GPUs are needed")
    def test_skipped(): pass
    @pytest.fixture
    def broken():
        yield
        raise OSError("at the end")
    def test_fails_in_teardown(broken): pass
    @pytest.mark.xfail(reason="known")
    def test_expected_to_fail(): assert False
    @pytest.mark.exhaustive
    def test_beyond(): pass
"""
PLUGIN = """
    from tests import exhaustive, gpu_report

    gpu_report.why_no_gpu = lambda: {why!r}
    gpu_report.machine = lambda: {{"device": {{"name": "a GPU"}}}}

    def pytest_addoption(parser):
        exhaustive.add_option(parser)

    def pytest_configure(config):
        config.addinivalue_line("markers", "exhaustive: beyond the curated cases")
        config.pluginmanager.register(gpu_report.GpuReport(config), "gpu-report")

    def pytest_collection_modifyitems(config, items):
        exhaustive.leave_out(config, items)
"""
FULL = "--exhaustive"


@pytest.fixture
def project(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """A small project with this plugin, on a computer that appears to have a GPU."""
    monkeypatch.setattr(gpu_report, "why_no_gpu", gpu_report.why_no_gpu)
    monkeypatch.setattr(gpu_report, "machine", gpu_report.machine)
    pytester.makeini("[pytest]\ntestpaths = tests")
    pytester.makeconftest(PLUGIN.format(why=None))
    pytester.mkdir("tests").joinpath("test_it.py").write_text(cleaned(SUITE), "utf-8")
    pytester.mkdir("rawattn").joinpath("a.py").write_text("a = 1\n", "utf-8")
    pytester.mkdir("kernels_cu").joinpath("k.cu").write_text("kernel\n", "utf-8")
    return pytester


def cleaned(text: str) -> str:
    return "\n".join(line.removeprefix("    ") for line in text.splitlines())


def written(project: pytest.Pytester) -> dict[str, Any]:
    return gpu_report.read(project.path / gpu_report.REPORT)


def test_full_run_is_recorded(project: pytest.Pytester) -> None:
    result = project.runpytest_inprocess(FULL)
    result.stdout.fnmatch_lines(["*reports/gpu.json written*"])
    record = written(project)
    counts = {"passed": 2, "failed": 2, "skipped": 1, "xfailed": 1}
    assert record["tests"] == {"tests/test_it.py": counts}
    assert record["total"] == counts
    assert record["failures"] == [
        "tests/test_it.py::test_fails",
        "tests/test_it.py::test_fails_in_teardown",
    ]
    assert record["skips"] == {"two GPUs are needed": 1}
    assert record["device"] == {"name": "a GPU"}
    assert record["source"] == gpu_report.source_hash(project.path)
    assert record["sanitizer"] is None
    assert "test_fails" in str(gpu_report.problem(project.path))


@pytest.mark.parametrize(
    "arguments",
    [
        ["-k", "passes"],
        ["-m", "not slow"],
        ["tests/test_it.py"],
        ["tests/test_it.py::test_passes"],
        ["--deselect", "tests/test_it.py::test_fails"],
        ["--ignore", "tests/test_other.py"],
        ["-x"],
    ],
    ids=" ".join,
)
def test_part_of_a_run_is_not(project: pytest.Pytester, arguments: list[str]) -> None:
    result = project.runpytest_inprocess(FULL, *arguments)
    result.stdout.fnmatch_lines(["*gpu.json not written*"])
    assert written(project) == {}


def test_curated_cases_alone_are_not(project: pytest.Pytester) -> None:
    result = project.runpytest_inprocess()
    result.stdout.fnmatch_lines(["*1 deselected*", "*gpu.json not written: the exhaustive cases*"])
    result.assert_outcomes(passed=2, failed=1, skipped=1, xfailed=1, errors=1, deselected=1)
    assert written(project) == {}


@pytest.mark.parametrize("argument", [".", "tests"])
def test_naming_all_of_it_is_full(project: pytest.Pytester, argument: str) -> None:
    project.runpytest_inprocess(FULL, argument)
    assert written(project)["total"]["passed"] == 2


def test_all_that_needs_a_gpu_is_full(project: pytest.Pytester) -> None:
    project.path.joinpath("tests/test_gpu.py").write_text(
        "import pytest\n\n@pytest.mark.gpu\ndef test_it():\n    pass\n", "utf-8"
    )
    project.runpytest_inprocess(FULL, "-m", "gpu")
    assert written(project)["total"] == {"passed": 1, "failed": 0, "skipped": 0}


def test_interrupted_run_is_not(project: pytest.Pytester) -> None:
    project.path.joinpath("tests/test_zz.py").write_text("raise KeyboardInterrupt\n", "utf-8")
    project.runpytest_subprocess("-p", "no:cacheprovider", FULL)
    assert written(project) == {}


def test_collection_error_is_not(project: pytest.Pytester) -> None:
    project.path.joinpath("tests/test_zz.py").write_text("import no_such_module\n", "utf-8")
    project.runpytest_inprocess(FULL).stdout.fnmatch_lines(["*gpu.json not written*"])
    assert written(project) == {}


def test_without_a_gpu_nothing_is_written(project: pytest.Pytester) -> None:
    project.makeconftest(PLUGIN.format(why="no GPU"))
    project.runpytest_inprocess(FULL).stdout.no_fnmatch_line("*gpu.json*")
    assert written(project) == {}


def test_sanitizer_findings_belong_to_their_source(project: pytest.Pytester) -> None:
    project.runpytest_inprocess(FULL)
    path = project.path / gpu_report.REPORT
    found = {"memcheck": {"runs": 3, "findings": 0}}
    path.write_text(json.dumps({**written(project), "sanitizer": found}), "utf-8")
    project.runpytest_inprocess(FULL)
    assert written(project)["sanitizer"] == found
    project.path.joinpath("kernels_cu/k.cu").write_text("another\n", "utf-8")
    project.runpytest_inprocess(FULL)
    assert written(project)["sanitizer"] is None


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "rawattn/sub").mkdir(parents=True)
    (tmp_path / "kernels_cu").mkdir()
    (tmp_path / "rawattn/sub/a.py").write_text("a = 1\n", "utf-8")
    (tmp_path / "kernels_cu/k.cu").write_text("kernel\n", "utf-8")
    return tmp_path


def test_hash_sees_every_change_of_source(root: Path) -> None:
    seen = [gpu_report.source_hash(root)]
    (root / "rawattn/sub/a.py").write_text("a = 2\n", "utf-8")
    seen.append(gpu_report.source_hash(root))
    (root / "rawattn/sub/a.py").rename(root / "rawattn/a.py")
    seen.append(gpu_report.source_hash(root))
    (root / "kernels_cu/new.cuh").write_text("", "utf-8")
    seen.append(gpu_report.source_hash(root))
    assert len(set(seen)) == 4


def test_hash_sees_nothing_else(root: Path) -> None:
    before = gpu_report.source_hash(root)
    (root / "rawattn/__pycache__").mkdir()
    (root / "rawattn/__pycache__/a.cpython-311.pyc").write_bytes(b"compiled")
    (root / "rawattn/fast.so").write_bytes(b"compiled")
    (root / "rawattn/.a.py.swp").write_bytes(b"editor")
    for name in (
        "_cli/info.py",
        "_console/table.py",
        "_bench/suites.py",
        "_bench/sub/a.json",
        "cli.py",
        "__main__.py",
        "py.typed",
    ):
        path = root / "rawattn" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("text\n", "utf-8")
    (root / "README.md").write_text("text\n", "utf-8")
    (root / "tests").mkdir()
    (root / "tests/test_it.py").write_text("text\n", "utf-8")
    assert gpu_report.source_hash(root) == before


@pytest.mark.parametrize("name", ["rawattn/_clip.py", "rawattn/sub/cli.py", "kernels_cu/cli.py"])
def test_hash_sees_what_is_only_named_alike(root: Path, name: str) -> None:
    before = gpu_report.source_hash(root)
    (root / name).write_text("text\n", "utf-8")
    assert gpu_report.source_hash(root) != before


def test_nothing_hashed_imports_what_is_not() -> None:
    """Hashed modules import no module that is not hashed: else a change of the command line or the benches could change what a
    call does, unnoticed."""
    modules = [name for name in gpu_report.sources() if name.endswith(".py")]
    assert len(modules) > 20
    for name in modules:
        for node in ast.walk(ast.parse((gpu_report.ROOT / name).read_text("utf-8"))):
            imported = []
            if isinstance(node, ast.Import):
                imported = [each.name for each in node.names]
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{name}: imports relatively"
                module = node.module or ""
                imported = [module, *(f"{module}.{each.name}" for each in node.names)]
            for each in imported:
                path = each.replace(".", "/")
                assert not f"{path}/".startswith(gpu_report.UNCOVERED), f"{name}: imports {each}"
                assert f"{path}.py" not in gpu_report.UNCOVERED, f"{name}: imports {each}"


def test_everything_hashed_is_there() -> None:
    names = gpu_report.sources()
    assert {name.split("/")[0] for name in names} == {"rawattn", "kernels_cu"}
    assert "rawattn/__init__.py" in names
    for left_out in gpu_report.UNCOVERED:
        assert (gpu_report.ROOT / left_out).exists(), f"{left_out} is left out, but is not there"
        assert not any(name.startswith(left_out) for name in names)


def write(root: Path, **changes: Any) -> None:
    record: dict[str, Any] = {
        "date": "2026-01-01T00:00:00+00:00",
        "source": gpu_report.source_hash(root),
        "device": {"name": "a GPU"},
        "total": {"passed": 5, "failed": 0, "skipped": 1},
        "failures": [],
        "sanitizer": {"memcheck": {"runs": 3, "findings": 0}},
    }
    (root / "reports").mkdir(exist_ok=True)
    (root / gpu_report.REPORT).write_text(json.dumps({**record, **changes}), "utf-8")


def test_current_record_passes(root: Path) -> None:
    write(root)
    assert gpu_report.problem(root) is None
    write(root, sanitizer=None)
    assert gpu_report.problem(root) is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"source": "0" * 64}, "is stale"),
        ({"total": {"passed": 4, "failed": 1}, "failures": ["tests/t.py::test_x"]}, "test_x"),
        ({"total": {"passed": 0, "failed": 0}}, "no test that passed"),
        ({"total": {}}, "records failures"),
        ({"sanitizer": {"racecheck": {"runs": 3, "findings": 2}}}, "2 findings.*racecheck"),
    ],
    ids=["stale", "failed", "empty", "torn", "sanitizer"],
)
def test_bad_record_is_refused(root: Path, changes: dict[str, Any], message: str) -> None:
    write(root, **changes)
    with pytest.raises(AssertionError, match=message):
        assert gpu_report.problem(root) is None, gpu_report.problem(root)


def test_missing_or_damaged_record_is_refused(root: Path) -> None:
    assert "missing or damaged" in str(gpu_report.problem(root))
    write(root)
    (root / gpu_report.REPORT).write_text('{"source": ', "utf-8")
    assert "missing or damaged" in str(gpu_report.problem(root))


def test_command(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_report, "ROOT", root)
    assert gpu_report.main(["--check"]) == 1
    assert "missing" in capsys.readouterr().err
    assert gpu_report.main(["--pending", "the GPU is busy"]) == 0
    assert gpu_report.main(["--check"]) == 0
    assert "WARNING" in (error := capsys.readouterr().err) and "the GPU is busy" in error
    write(root)
    assert gpu_report.main(["--check"]) == 0
    assert "a GPU" in capsys.readouterr().out
    assert gpu_report.main(["--pending", "changed again"]) == 0
    assert gpu_report.read(root / gpu_report.REPORT)["device"] == {"name": "a GPU"}
    with pytest.raises(SystemExit):
        gpu_report.main(["--pending", " "])


def test_counts_keep_the_usual_three() -> None:
    assert gpu_report.count(Counter(passed=2)) == {"passed": 2, "failed": 0, "skipped": 0}


def test_this_machine_has_a_gpu_or_a_reason() -> None:
    reason = gpu_report.why_no_gpu()
    assert reason is None or (reason.startswith("no GPU: ") and "\n" not in reason)


@pytest.mark.gpu
def test_machine() -> None:
    facts = gpu_report.machine()
    assert facts["device"]["name"]
    assert facts["device"]["count"] >= 1
    assert set(facts["versions"]) >= {"cuda_runtime", "nvrtc", "python", "numpy"}
    json.dumps(facts)
