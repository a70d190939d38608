"""How code objects are built: targets, compilers, what is compiled again and what is not, on kernels of two lines."""

from __future__ import annotations

import shutil
from pathlib import Path

import build_kernels
import pytest
from build_kernels import BuildError, Clang, build, find_clang, local_targets, resolve
from isa import notes

KERNEL = 'extern "C" __attribute__((global)) void {name}(int *p) {{ *p = {value}; }}\n'


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A source tree of two kernel files, one of which includes a header."""
    kernels = tmp_path / "native/gpu/kernels"
    kernels.mkdir(parents=True)
    (kernels / "one.hip").write_text(KERNEL.format(name="one", value=1))
    (kernels / "two.hip").write_text('#include "two.h"\n' + KERNEL.format(name="two", value="TWO"))
    (kernels / "two.h").write_text("#define TWO 2\n")
    monkeypatch.setattr(build_kernels, "ROOT", tmp_path)
    monkeypatch.setattr(build_kernels, "KERNELS", kernels)
    monkeypatch.setattr(build_kernels, "WORK", tmp_path / "build/gpu")
    monkeypatch.setattr(build_kernels, "ZIGLANG", tmp_path / "build/ziglang")
    for function in (build_kernels.find_clang, build_kernels.find_nvcc, build_kernels.digest_of):
        function.cache_clear()
    yield tmp_path
    for function in (build_kernels.find_clang, build_kernels.find_nvcc, build_kernels.digest_of):
        function.cache_clear()


def make(tree: Path, spec: str, capsys: pytest.CaptureFixture[str]) -> str:
    build_kernels.digest_of.cache_clear()
    build(resolve(spec, fetch=False, apt=False), tree / "out", jobs=2)
    return capsys.readouterr().out


def test_one_object_of_all_files_and_only_what_changed_again(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = make(tree, "gfx1151,gfx90a", capsys)
    assert "compiling 4 files with" in said
    assert "gfx1151, gfx90a in" in said
    metadata = notes(tree / "out/gfx1151.co")
    assert [k[".name"] for k in metadata["amdhsa.kernels"]] == ["one", "two"]  # of one note
    assert metadata["amdhsa.target"] == "amdgcn-amd-amdhsa--gfx1151"
    before = (tree / "out/gfx1151.co").read_bytes()
    assert make(tree, "gfx1151,gfx90a", capsys) == ""
    kernels = tree / "native/gpu/kernels"
    (kernels / "two.h").touch()
    assert make(tree, "gfx1151", capsys) == ""  # contents count, not times
    (kernels / "two.h").write_text("#define TWO 3\n")
    said = make(tree, "gfx1151", capsys)
    assert "compiling 1 file with" in said
    assert "gfx90a.co is stale: removed" in said
    assert [path.name for path in sorted((tree / "out").iterdir())] == ["gfx1151.co"]
    assert (tree / "out/gfx1151.co").read_bytes() != before
    (kernels / "two.h").write_text("#define TWO 2\n")
    make(tree, "gfx1151", capsys)
    assert (tree / "out/gfx1151.co").read_bytes() == before  # the same sources, the same bytes
    (tree / "out/gfx1151.co").write_bytes(b"damaged")
    assert "gfx1151 in" in make(tree, "gfx1151", capsys)
    assert (tree / "out/gfx1151.co").read_bytes() == before
    (kernels / "two.hip").unlink()
    make(tree, "gfx1151", capsys)
    assert [k[".name"] for k in notes(tree / "out/gfx1151.co")["amdhsa.kernels"]] == ["one"]
    assert make(tree, "none", capsys) == ""
    assert (tree / "out/gfx1151.co").exists()  # still current


def test_errors_name_the_file(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tree / "native/gpu/kernels/one.hip").write_text("nonsense\n")
    with pytest.raises(BuildError, match=r"gfx1151: one\.hip: .*\n(.*\n)*.*unknown type name 'nonsense'"):
        make(tree, "gfx1151", capsys)
    with pytest.raises(BuildError, match="unknown GPU target gfx803; there are gfx1151, "):
        resolve("gfx1151,gfx803", fetch=False, apt=False)


def test_without_a_compiler_the_message_says_how_to_get_one(
    tree: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(build_kernels, "clang_candidates", lambda: iter(()))
    monkeypatch.setattr(build_kernels, "KFD", tree / "no")
    with pytest.raises(BuildError, match=r"no compiler for AMD GPUs\.\nNeeded: clang 18 .*apt install clang-19 lld-19"):
        resolve("gfx1151", fetch=False, apt=False)
    monkeypatch.setenv("PATH", str(tree))
    assert resolve("auto", fetch=False, apt=False) == []
    assert "no GPU here, and no compiler for one" in capsys.readouterr().out
    monkeypatch.setattr(build_kernels, "fetch_clang", lambda apt: (_ for _ in ()).throw(BuildError("no network")))
    with pytest.raises(BuildError, match="no compiler for AMD GPUs: no network"):
        resolve("all", fetch=True, apt=False)


def test_zig_serves_where_there_is_no_clang(
    tree: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A zig of ours that hands on to the clang at hand, as ziglang's does to its own."""
    real = find_clang()[0]
    assert real is not None and real.clang[1:] == ()
    zig = tree / "build/ziglang/ziglang/zig"
    zig.parent.mkdir(parents=True)
    cases = f'clang) shift; exec {real.clang[0]} "$@";; ld.lld) shift; exec {shutil.which(real.lld[0])} "$@";;'
    zig.write_text(f"#!{shutil.which('sh')}\ncase $1 in {cases} esac\n")
    zig.chmod(0o755)
    find_clang.cache_clear()
    monkeypatch.setenv("PATH", str(tree))
    for name in ("ROCM_PATH", "HIP_PATH"):
        monkeypatch.delenv(name, raising=False)
    said = make(tree, "gfx1151", capsys)
    assert f"{zig} clang" in said or "/opt/rocm" in said or "_rocm_sdk_core" in said
    assert len(notes(tree / "out/gfx1151.co")["amdhsa.kernels"]) == 2


@pytest.mark.parametrize(
    ("versions", "targets"),
    [([0, 110501], ["gfx1151"]), ([90010, 110000, 110000], ["gfx90a", "gfx1100"]), ([120001], ["gfx1201"]), ([], [])],
)
def test_targets_of_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, versions: list[int], targets: list[str]
) -> None:
    for node, version in enumerate(versions):
        (tmp_path / str(node)).mkdir()
        (tmp_path / str(node) / "properties").write_text(
            f"cpu_cores_count 0\ngfx_target_version {version}\nvendor_id 4098\n"
        )
    monkeypatch.setattr(build_kernels, "KFD", tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert local_targets() == targets


def test_the_compiler_at_hand_makes_what_it_says() -> None:
    clang, reasons = find_clang()
    assert isinstance(clang, Clang), reasons
    assert build_kernels.compiles(clang, "gfx1151") == ""
    assert build_kernels.compiles(clang, "gfx9999") != ""
