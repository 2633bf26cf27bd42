"""What packagers and citations read says what pyproject.toml and the C header say."""

from __future__ import annotations

import re
import sys
import sysconfig
from typing import Any

import pytest

import pb_kvcache

from .conftest import ROOT, Run


def read_yaml(name: str) -> Any:
    if not (ROOT / name).exists():
        pytest.skip(f"the sdist has no {name}")
    return pytest.importorskip("yaml").safe_load((ROOT / name).read_text(encoding="utf-8"))


def project(field: str) -> list[str]:
    """Return a list of strings of pyproject.toml. Python 3.10 has no reader for it."""
    found = re.search(rf"^{field} = \[(.*?)\]$", (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.M | re.S)
    assert found, field
    return re.findall(r'"([^"]*)"', found[1])


def spaceless(requirements: list[str]) -> set[str]:
    return {requirement.replace(" ", "") for requirement in requirements}


def test_conda_recipe_has_the_version_and_dependencies_of_the_package() -> None:
    recipe = read_yaml("conda/recipe.yaml")
    assert recipe["context"]["version"] == pb_kvcache.__version__
    assert recipe["package"] == {"name": "pb-kvcache", "version": "${{ version }}"}
    needed = recipe["requirements"]
    (python,) = re.findall(r'^requires-python = "(.*)"', (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.M)
    assert spaceless(needed["run"]) == {f"python{python}", *project("dependencies")}
    assert spaceless(needed["host"]) == {f"python{python}", "pip", *project("requires")}
    assert needed["build"] == ['${{ compiler("c") }}']
    assert (ROOT / "conda" / recipe["source"]["path"]).resolve() == ROOT
    assert (ROOT / recipe["about"]["license_file"]).exists()


def test_citation_has_the_version_and_the_papers() -> None:
    citation = read_yaml("CITATION.cff")
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()
    assert citation["cff-version"] == "1.2.0"
    assert citation["version"] == pb_kvcache.__version__
    assert citation["license"] == "MIT"
    assert citation["keywords"] == project("keywords")
    papers = {paper["identifiers"][0]["value"]: paper for paper in citation["references"]}
    assert papers.keys() == {"arXiv:2406.02069", "arXiv:2404.14469"}
    for number, paper in papers.items():
        assert paper["url"] == f"https://arxiv.org/abs/{number.removeprefix('arXiv:')}"
        assert all({"family-names", "given-names"} == author.keys() for author in paper["authors"])


def test_workflows_parse_and_every_needed_job_is_there() -> None:
    for name in ("ci", "nightly", "release"):
        jobs = read_yaml(f".github/workflows/{name}.yml")["jobs"]
        for job in jobs.values():
            needs = job.get("needs", [])
            assert set([needs] if isinstance(needs, str) else needs) <= jobs.keys()
            for step in job["steps"]:
                assert ("run" in step) != ("uses" in step), step


@pytest.mark.parametrize(("free_threaded", "tag"), [(0, "cp310"), (1, None)])
def test_a_free_threaded_build_has_no_stable_abi(free_threaded: int, tag: str | None, run: Run) -> None:
    """Run setup.py as an interpreter of that kind would, up to the build."""
    script = """
import runpy, sys, sysconfig, setuptools
real = sysconfig.get_config_var
sysconfig.get_config_var = lambda name: int(sys.argv[2]) if name == "Py_GIL_DISABLED" else real(name)
setuptools.setup = lambda **options: print(options["options"].get("bdist_wheel", {}).get("py_limited_api"))
runpy.run_path(sys.argv[1])
import build
settings = build.ffibuilder._assigned_source[3]
print(settings["py_limited_api"], settings["define_macros"])
"""
    pytest.importorskip("setuptools")
    said = run(sys.executable, "-c", script, ROOT / "setup.py", free_threaded).stdout.splitlines()
    macros = [] if free_threaded else [("Py_LIMITED_API", "0x030A0000")]
    assert said == [str(tag), f"{not free_threaded} {macros}"]


def test_the_module_that_runs_here_is_of_the_right_kind() -> None:
    (suffix,) = re.findall(r"_native\.(.*)", pb_kvcache._native.__file__)
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        assert "abi3" not in suffix
    elif sys.platform != "win32":
        assert suffix == "abi3.so"
