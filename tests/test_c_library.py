"""The C library as a user of C or C++ meets it: built, installed, found, linked."""

from __future__ import annotations

import graphlib
import json
import os
import re
import shutil
from pathlib import Path

import pytest

from .conftest import ROOT, Run

CSRC = ROOT / "csrc"

CONSUMER = """
#include <pb_kvcache.h>
#include <stdio.h>

int main(void)
{
    pb_kvcache *cache = pb_kvcache_snapkv.create(NULL, NULL, NULL);
    printf("%s %u\\n", pb_kvcache_version(), (unsigned)pb_kvcache_capacity(cache));
    pb_kvcache_snapkv.destroy(cache);
    return 0;
}
"""

#: A program as it is written for the policy registry: its headers, its vtable, its return values.
REGISTRY_PROGRAM = """
#include <policybook/kv_cache/kv_cache.h>
#include <policybook/kv_cache/pyramidkv.h>
#include <policybook/kv_cache/snapkv.h>
#include <stdio.h>

static size_t drive(const pb_kvcache_vtable *vtable, const void *params, uint32_t budget)
{
    uint32_t victims[64];
    float attn[64];
    size_t kept = 1;
    size_t evictions = 0;
    pb_kvcache *policy = vtable->create(params, NULL, NULL);
    for (uint32_t pos = 1; pos < 40; ++pos) {
        for (size_t i = 0; i < kept; ++i) {
            attn[i] = 1.0f / (float)(i + 1);
        }
        vtable->on_decode_step(policy, pos, attn, kept);
        ++kept;
        if (kept > budget) {
            size_t dropped = vtable->evict(policy, budget, victims, 64);
            kept -= dropped;
            evictions += dropped;
        }
    }
    if (vtable->memory_bytes != NULL && vtable->memory_bytes(policy) == 0) {
        return 0;
    }
    vtable->destroy(policy);
    return evictions;
}

int main(void)
{
    pb_kvcache_snapkv_params snapkv = PB_KVCACHE_SNAPKV_PARAMS_DEFAULT;
    pb_kvcache_pyramidkv_params pyramidkv = PB_KVCACHE_PYRAMIDKV_PARAMS_DEFAULT;
    snapkv.budget = 8u;
    snapkv.recent_window = 2u;
    pyramidkv.budget = 8u;
    pyramidkv.recent_window = 2u;
    pyramidkv.num_layers = 4u;
    pyramidkv.layer = 3u;
    printf("%zu %zu\\n", drive(&pb_kvcache_snapkv, &snapkv, 8u), drive(&pb_kvcache_pyramidkv, &pyramidkv, 8u));
    return 0;
}
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory, c_build: Path, run: Run) -> Path:
    """Install the static build to a folder, and then move the folder."""
    first = tmp_path_factory.mktemp("install") / "first"
    run("cmake", "--install", c_build, "--prefix", first)
    return Path(shutil.move(first, first.with_name("moved")))


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory, run: Run) -> Path:
    """Build and install the shared library."""
    folder = tmp_path_factory.mktemp("shared")
    run("cmake", "-S", CSRC, "-B", folder / "build", "-DBUILD_SHARED_LIBS=ON", "-DPB_KVCACHE_WERROR=ON")
    run("cmake", "--build", folder / "build", "--parallel", "2")
    run("ctest", "--test-dir", folder / "build", "--output-on-failure")
    run("cmake", "--install", folder / "build", "--prefix", folder / "prefix")
    return folder / "prefix"


def library(prefix: Path, name: str) -> Path:
    (found,) = prefix.glob(f"lib*/**/{name}")
    return found


def test_unit_tests_pass(c_build: Path, run: Run) -> None:
    assert "100% tests passed" in run("ctest", "--test-dir", c_build, "--output-on-failure").stdout


@pytest.mark.parametrize("kind", ["installed", "shared"])
@pytest.mark.parametrize("language", ["C", "CXX"])
def test_find_package_serves_c_and_cpp(
    kind: str, language: str, request: pytest.FixtureRequest, tmp_path: Path, run: Run
) -> None:
    prefix = request.getfixturevalue(kind)
    source = "main.c" if language == "C" else "main.cpp"
    (tmp_path / source).write_text(CONSUMER)
    (tmp_path / "CMakeLists.txt").write_text(
        f"cmake_minimum_required(VERSION 3.20)\nproject(consumer LANGUAGES {language})\n"
        f"set(CMAKE_CXX_STANDARD 17)\nfind_package(pb_kvcache 0.1 REQUIRED)\n"
        f"add_executable(consumer {source})\ntarget_link_libraries(consumer PRIVATE pb_kvcache::pb_kvcache)\n"
    )
    run("cmake", "-S", tmp_path, "-B", tmp_path / "build", f"-DCMAKE_PREFIX_PATH={prefix}")
    run("cmake", "--build", tmp_path / "build")
    assert run(tmp_path / "build" / "consumer").stdout.endswith(" 513\n")


@pytest.mark.parametrize(("build_type", "level"), [(None, "-O3"), ("Release", "-O3"), ("Debug", None)])
def test_a_parent_project_fetches_optimised_kernels(
    build_type: str | None, level: str | None, tmp_path: Path, run: Run
) -> None:
    (tmp_path / "main.c").write_text(CONSUMER)
    (tmp_path / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.20)\nproject(consumer LANGUAGES C)\n"
        "set(CMAKE_EXPORT_COMPILE_COMMANDS ON)\ninclude(FetchContent)\n"
        f'FetchContent_Declare(pb_kvcache SOURCE_DIR "{ROOT.as_posix()}" SOURCE_SUBDIR csrc)\n'
        "FetchContent_MakeAvailable(pb_kvcache)\n"
        "add_executable(consumer main.c)\ntarget_link_libraries(consumer PRIVATE pb_kvcache::pb_kvcache)\n"
    )
    chosen = [] if build_type is None else [f"-DCMAKE_BUILD_TYPE={build_type}"]
    run("cmake", "-S", tmp_path, "-B", tmp_path / "build", *chosen)
    commands = json.loads((tmp_path / "build" / "compile_commands.json").read_text())
    kernels = [entry["command"].split() for entry in commands if entry["file"].endswith("csrc/lanes.c")]
    assert len(kernels) == 1
    levels = [word for word in kernels[0] if word.startswith("-O")]
    assert levels[-1:] == ([] if level is None else [level])
    run("cmake", "--build", tmp_path / "build", "--parallel", "2")
    assert run(tmp_path / "build" / "consumer").stdout.endswith(" 513\n")


def test_the_licence_is_installed(installed: Path) -> None:
    assert (installed / "share/licenses/pb_kvcache/LICENSE").read_text() == (ROOT / "LICENSE").read_text()


@pytest.mark.parametrize("kind", ["installed", "shared"])
def test_pkg_config_serves_a_plain_compiler(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path, run: Run
) -> None:
    if shutil.which("pkg-config") is None:
        pytest.skip("pkg-config is not installed")
    prefix = request.getfixturevalue(kind)
    (tmp_path / "main.c").write_text(CONSUMER)
    pc = library(prefix, "pb_kvcache.pc")
    env = os.environ | {"PKG_CONFIG_PATH": str(pc.parent), "LD_LIBRARY_PATH": str(pc.parents[1])}
    flags = run("pkg-config", "--cflags", "--libs", "pb_kvcache", env=env).stdout.split()
    run("cc", "-std=c11", tmp_path / "main.c", "-o", tmp_path / "main", *flags)
    assert run(tmp_path / "main", env=env).stdout.endswith(" 513\n")


def test_a_program_for_the_registry_compiles_and_links_unchanged(installed: Path, tmp_path: Path, run: Run) -> None:
    (tmp_path / "main.c").write_text(REGISTRY_PROGRAM)
    run(
        *("cc", "-std=c11", "-Wall", "-Wextra", "-Werror", f"-I{installed / 'include'}", tmp_path / "main.c"),
        *(library(installed, "libpb_kvcache.a"), "-o", tmp_path / "main"),
    )
    # One by one from the 9th of 40 tokens on; and, by the deepest of four layers, which falls from 9 to its share of 3
    # (2 * 8 / 5) each time that it is asked, six at tokens 8, 14, 20, 26, 32 and 38.
    assert run(tmp_path / "main").stdout == "32 36\n"


def headers() -> list[str]:
    return sorted(path.relative_to(CSRC / "include").as_posix() for path in (CSRC / "include").rglob("*.h"))


@pytest.mark.parametrize("header", headers())
@pytest.mark.parametrize(("compiler", "standard"), [("c++", "c++17"), ("cc", "c11")])
def test_every_header_stands_alone(header: str, compiler: str, standard: str, tmp_path: Path, run: Run) -> None:
    source = tmp_path / ("main.cpp" if compiler == "c++" else "main.c")
    source.write_text(f'#include "{header}"\n#include "{header}"\nint main(void) {{ return 0; }}\n')
    run(
        *(compiler, f"-std={standard}", "-Wall", "-Wextra", "-Wpedantic", "-Werror", "-fsyntax-only"),
        *(f"-I{CSRC / 'include'}", source),
    )


def test_the_shared_library_exports_exactly_the_listed_symbols(shared: Path, run: Run) -> None:
    listing = run("nm", "-D", "--defined-only", library(shared, "libpb_kvcache.so")).stdout
    exported = sorted(line.split()[-1] for line in listing.splitlines())
    assert exported == (CSRC / "symbols.txt").read_text().split()


def test_the_static_library_defines_no_foreign_names(installed: Path, run: Run) -> None:
    listing = run("nm", "-g", "--defined-only", library(installed, "libpb_kvcache.a")).stdout
    names = [line.split()[-1] for line in listing.splitlines() if len(line.split()) == 3]
    assert names
    assert [name for name in names if not name.startswith("pb_kvcache_")] == []


def test_the_sources_use_each_other_without_a_circle(installed: Path, run: Run) -> None:
    """As internal.h says: bits, inner loops, checks, kernels, then the policies and the selection."""
    listing = run("nm", "-A", library(installed, "libpb_kvcache.a")).stdout
    symbols = re.findall(r":(\w+\.c)\.o(?:bj)?:\s*[0-9a-f]* (\w) (pb_kvcache_\w+)$", listing, re.M)
    home = {name: source for source, kind, name in symbols if kind not in "Uwv"}
    uses: dict[str, set[str]] = {source: set() for source in home.values()}
    for source, kind, name in symbols:
        if kind == "U":
            uses[source].add(home[name])
    order = list(graphlib.TopologicalSorter(uses).static_order())  # raises on a circle
    assert {"lanes.c", "checks.c", "score.c", "pool.c", "choose.c", "select.c", "policy.c"} <= set(order)
    assert uses["lanes.c"] == set()
    assert uses["checks.c"] == {"lanes.c"}
    for kernel in ("score.c", "pool.c", "choose.c"):
        assert uses[kernel] <= {"lanes.c", "checks.c"}


def test_the_library_keeps_no_mutable_state(installed: Path, run: Run) -> None:
    """What is not code is constant; .data.rel.ro is, once it is relocated."""
    listing = run("nm", library(installed, "libpb_kvcache.a")).stdout
    assert [line for line in listing.splitlines() if re.search(r" [bBcCsSgG] ", line)] == []
    data = [line.split()[-1] for line in listing.splitlines() if re.search(r" [dD] ", line)]
    sections = run("objdump", "-t", library(installed, "libpb_kvcache.a")).stdout
    assert [
        name for name in data if not re.search(rf"\.data\.rel\.ro\S*\s.*\s{re.escape(name)}$", sections, re.M)
    ] == []


@pytest.mark.parametrize("example", sorted(path.stem for path in (CSRC / "examples").glob("*.c")))
def test_example_runs(example: str, c_build: Path, run: Run) -> None:
    assert run(c_build / example).stdout


def test_flags_that_change_results_are_refused(tmp_path: Path, run: Run) -> None:
    for flag in ("-ffast-math", "-ffinite-math-only"):
        done = run(
            *("cc", "-std=c11", flag, f"-I{CSRC / 'include'}", "-c", CSRC / "status.c", "-o", tmp_path / "x.o"),
            status=1,
        )
        assert "must not be compiled with -ffast-math" in done.stderr
