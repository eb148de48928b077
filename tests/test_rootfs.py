"""Archives that try to leave the folder they are unpacked to, and honest ones that must come out as they are."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import os
import stat
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentgym.errors import PathRefused, SandboxError
from agentgym.sandboxes import untar
from agentgym.sandboxes.rootfs import unpack, unpack_image

MIB = 1 << 20
Member = tuple[tarfile.TarInfo, bytes]


def member(name: str, data: bytes = b"", kind: bytes = tarfile.REGTYPE, *, to: str = "", mode: int = 0o644) -> Member:
    info = tarfile.TarInfo(name)
    info.type, info.size, info.linkname, info.mode, info.mtime = kind, len(data), to, mode, 1_000_000_000
    info.uid, info.gid = os.getuid(), os.getgid()
    return info, data


def folder(name: str, mode: int = 0o755) -> Member:
    return member(name, kind=tarfile.DIRTYPE, mode=mode)


def link(name: str, to: str) -> Member:
    return member(name, kind=tarfile.SYMTYPE, to=to, mode=0o777)


def hard(name: str, to: str) -> Member:
    return member(name, kind=tarfile.LNKTYPE, to=to)


def tar(members: Sequence[Member]) -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for info, data in members:
            archive.addfile(info, io.BytesIO(data))
    return made.getvalue()


def image(layers: Sequence[bytes], *extra: Member, count: int = 1) -> bytes:
    names = [f"{number}/layer.tar" for number in range(len(layers))]
    manifest = json.dumps([{"Config": "c.json", "RepoTags": ["a:b"], "Layers": names}] * count).encode()
    return tar([*(member(n, d) for n, d in zip(names, layers, strict=True)), member("manifest.json", manifest), *extra])


def found(place: Path) -> dict[str, str]:
    """Path to content, link target, or "dir"."""
    listed = {}
    for path in sorted(place.rglob("*")):
        name = str(path.relative_to(place))
        listed[name] = os.readlink(path) if path.is_symlink() else "dir" if path.is_dir() else path.read_text()
    return listed


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with something beside it that an archive must not reach."""
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "secret").write_text("kept")
    return tmp_path


def run(
    place: Path, content: bytes, unpacker: Callable[..., None] = unpack, *, max_bytes: int = 64 * MIB, **options: bool
) -> Path:
    (place / "archive").write_bytes(content)
    unpacker(str(place / "archive"), str(place / "root"), max_bytes=max_bytes, **options)
    return place / "root"


def assert_untouched(place: Path) -> None:
    assert sorted(path.name for path in place.iterdir()) == ["archive", "outside"]
    assert found(place / "outside") == {"secret": "kept"}


HONEST = [
    folder("./", 0o755),
    folder("./etc"),
    member("./etc/hosts", b"127.0.0.1", mode=0o600),
    folder("./usr/bin"),
    link("./bin", "usr/bin"),
    link("./usr/bin/awk", "/etc/alternatives/awk"),
    link("./usr/bin/up", "../../etc/hosts"),
    hard("./etc/same", "./etc/hosts"),
    folder("./tmp", 0o1777),
    folder("./locked", 0o555),
    member("./locked/in", b"x"),
    folder("./late/inner"),
    member("late/inner/ü" + "n" * 200, b"y"),
    folder("./late", 0o750),
]


@pytest.mark.parametrize("pack", [bytes, gzip.compress, bz2.compress, lzma.compress])
def test_an_honest_archive_comes_out_as_it_is(place: Path, pack: Callable[[bytes], bytes]) -> None:
    root = run(place, pack(tar(HONEST)))
    assert found(root) == {
        "etc": "dir",
        "etc/hosts": "127.0.0.1",
        "etc/same": "127.0.0.1",
        "usr": "dir",
        "usr/bin": "dir",
        "bin": "usr/bin",
        "usr/bin/awk": "/etc/alternatives/awk",
        "usr/bin/up": "../../etc/hosts",
        "tmp": "dir",
        "locked": "dir",
        "locked/in": "x",
        "late": "dir",
        "late/inner": "dir",
        "late/inner/ü" + "n" * 200: "y",
    }
    modes = {name: stat.S_IMODE((root / name).stat().st_mode) for name in (".", "etc/hosts", "tmp", "locked", "late")}
    assert modes == {".": 0o755, "etc/hosts": 0o600, "tmp": 0o1777, "locked": 0o555, "late": 0o750}
    assert (root / "etc/hosts").stat().st_mtime == (root / "late").stat().st_mtime == 1_000_000_000
    assert (root / "etc/hosts").samefile(root / "etc/same")
    assert sorted(path.name for path in place.iterdir()) == ["archive", "outside", "root"]


LONG = "d" * 255
REFUSED = {
    "climbs": ([member("../outside/secret", b"x")], "../outside/secret"),
    "climbs in the middle": ([folder("a"), member("a/../../outside/new", b"x")], "a/../../outside/new"),
    "absolute": ([member("/etc/passwd", b"x")], "/etc/passwd"),
    "link out": ([link("away", "../outside")], "away"),
    "link far out": ([link("a/b/away", "../../../../etc")], "a/b/away"),
    "through a link to outside": ([link("away", "/tmp"), member("away/new", b"x")], "away/new"),
    "through a link inside": ([folder("a"), link("b", "a"), member("b/new", b"x")], "b/new"),
    "through two links": ([link("x", "y"), link("y", "/"), member("x/etc/new", b"x")], "x/etc/new"),
    "folder through a link": ([link("away", "/tmp"), folder("away/new")], "away/new"),
    "link made over by a folder, then through it": ([link("away", "/tmp"), folder("away")], "away"),
    "through a file": ([member("a", b"x"), member("a/b", b"x")], "a/b"),
    "hard link out": ([hard("a", "../outside/secret")], "a"),
    "hard link to an absolute path": ([hard("a", "/etc/passwd")], "a"),
    "hard link through a link": ([link("away", "/etc"), hard("a", "away/passwd")], "a"),
    "hard link to nothing": ([hard("a", "b")], "a"),
    "hard link to a folder": ([folder("b"), hard("a", "b")], "a"),
    "character device": ([member("null", kind=tarfile.CHRTYPE)], "null"),
    "block device": ([member("disk", kind=tarfile.BLKTYPE)], "disk"),
    "pipe": ([member("pipe", kind=tarfile.FIFOTYPE)], "pipe"),
    "setuid": ([member("su", b"x", mode=0o4755)], "su"),
    "setgid": ([member("wall", b"x", mode=0o2755)], "wall"),
    "twice": ([member("a", b"1"), member("a", b"2")], "a"),
    "twice, spelt otherwise": ([member("d/a", b"1"), member("./d//a", b"2")], "./d//a"),
    "link over a file": ([member("a", b"1"), link("a", "b")], "a"),
    "file over a folder": ([member("a/b", b"1"), member("a", b"2")], "a"),
    "long name": ([member("n" * 256, b"x")], "n" * 256),
    "long path": ([member("/".join([LONG] * 13), b"x")], "/".join([LONG] * 13)),
    "deep path": ([member("/".join("d" * 201), b"x")], "/".join("d" * 201)),
    "long target": ([link("a", "t" * 4000)], "a"),
    "empty target": ([link("a", "")], "a"),
    "a root that is a file": ([member("./", b"x")], "./"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_an_archive_is_refused_as_a_whole_with_the_members_name(place: Path, case: str) -> None:
    """C087."""
    members, name = REFUSED[case]
    with pytest.raises(PathRefused, match="nothing was unpacked") as refused:
        run(place, tar([member("first", b"honest"), *members]))
    assert f"member {name!r}" in str(refused.value)
    assert_untouched(place)


@pytest.mark.parametrize("unpacker", [unpack, unpack_image])
def test_setuid_bits_are_cleared_when_told_to(place: Path, unpacker: Callable[..., None]) -> None:
    layer = tar([member("su", b"x", mode=0o6755), folder("mail", 0o2775)])
    root = run(place, layer if unpacker is unpack else image([layer]), unpacker, clear_setuid=True)
    assert stat.S_IMODE((root / "su").stat().st_mode) == 0o755
    assert stat.S_IMODE((root / "mail").stat().st_mode) == 0o2775


def test_an_owner_that_nobody_can_be_is_refused(place: Path) -> None:
    info, data = member("a", b"x")
    info.uid = 2**32
    with pytest.raises(PathRefused, match="'a' belongs to"):
        run(place, tar([(info, data)]))
    assert_untouched(place)


def test_more_bytes_than_allowed_are_refused(place: Path) -> None:
    content = tar([member("small", b"x" * 1000), member("large", os.urandom(4500).hex().encode())])
    with pytest.raises(PathRefused, match=r"'large' makes it more than 10000 bytes"):
        run(place, content, max_bytes=10_000)
    assert_untouched(place)
    assert found(run(place, content, max_bytes=12_000)).keys() == {"small", "large"}


def test_many_empty_members_count_too(place: Path) -> None:
    with pytest.raises(PathRefused, match=r"'e39' makes it more than 20000 bytes"):
        run(place, tar([member(f"e{number}") for number in range(100)]), max_bytes=20_000)
    assert_untouched(place)


def test_a_bomb_is_refused_by_its_ratio(place: Path) -> None:
    content = gzip.compress(tar([member("zeros", bytes(40 * MIB))]))
    assert len(content) * untar.MAX_RATIO < 40 * MIB
    with pytest.raises(PathRefused, match="'zeros' makes it more than 200 times"):
        run(place, content, max_bytes=1 << 40)
    assert_untouched(place)


def test_a_sparse_bomb_is_refused_by_its_apparent_size(place: Path) -> None:
    sparse = bytearray(tar([member("holes", b"x" * 512)]))
    sparse[156:157] = tarfile.GNUTYPE_SPARSE
    sparse[257:265] = b"ustar  \0"
    sparse[386:410] = b"%011o\0%011o\0" % (0, 512)
    sparse[483:495] = b"%011o\0" % (1 << 32)
    sparse[148:156] = b"        "
    sparse[148:156] = b"%06o\0 " % sum(sparse[:512])
    with pytest.raises(PathRefused, match="'holes' makes it more than"):
        run(place, bytes(sparse))
    assert_untouched(place)


def test_a_header_cannot_fill_the_memory(place: Path) -> None:
    """A packed header of a gigabyte of zeros would be read at once by the library."""
    header = bytearray(tar([member("x", b"")])[:512])
    header[156:157] = tarfile.XHDTYPE
    header[124:136] = b"%011o\0" % (1 << 30)
    header[148:156] = b"        "
    header[148:156] = b"%06o\0 " % sum(header)
    with pytest.raises(PathRefused, match="followed by a header of"):
        run(place, gzip.compress(tar([member("first")])[:512] + bytes(header) + bytes(MIB)))
    assert_untouched(place)


def test_what_a_packed_file_says_of_its_size_is_not_skipped_over(place: Path) -> None:
    outer = io.BytesIO(tar([member("manifest.json", b"[]")]))
    header = bytearray(outer.getvalue()[:512])
    header[124:136] = b"%011o\0" % (7 << 30)
    header[148:156] = b"        "
    header[148:156] = b"%06o\0 " % sum(header)
    with pytest.raises(PathRefused, match="says it ends at byte"):
        run(place, gzip.compress(bytes(header) + bytes(MIB)), unpack_image)
    assert_untouched(place)


@pytest.mark.parametrize("cut", [100, 512, 600, 1024, 2100])
def test_a_short_archive_is_no_archive(place: Path, cut: int) -> None:
    with pytest.raises(SandboxError, match=r"cut short|cannot be unpacked"):
        run(place, tar([member("a", b"x" * 700), member("b", b"y" * 10)])[:cut])
    assert_untouched(place)


@pytest.mark.parametrize("content", [b"", b"no archive", bytes(300), gzip.compress(b"x" * 2000), b"\x1f\x8bbroken"])
def test_what_is_no_archive_is_an_error_of_ours(place: Path, content: bytes) -> None:
    for unpacker in (unpack, unpack_image):
        with pytest.raises(SandboxError):
            run(place, content, unpacker)
        assert_untouched(place)


def test_a_broken_header_in_the_middle_is_not_the_end(place: Path) -> None:
    content = bytearray(tar([member("a", b"x"), member("b", b"y")]))
    content[1024 + 148 : 1024 + 156] = b"notasum\0"
    with pytest.raises(SandboxError, match="cut short or broken after member 'a'"):
        run(place, bytes(content))
    assert_untouched(place)


def test_zstd_says_what_to_do(place: Path) -> None:
    with pytest.raises(SandboxError, match="pack it with gzip"):
        run(place, b"\x28\xb5\x2f\xfd" + bytes(100))


def test_a_folder_that_has_something_is_left_alone(place: Path) -> None:
    (place / "root").mkdir()
    (place / "root" / "mine").write_text("kept")
    with pytest.raises(SandboxError, match="not an empty folder"):
        run(place, tar([member("a", b"x")]))
    assert found(place / "root") == {"mine": "kept"}
    (place / "root" / "mine").unlink()
    assert found(run(place, tar([member("a", b"x")]))) == {"a": "x"}


def test_a_link_in_place_of_the_folder_is_not_followed(place: Path) -> None:
    (place / "root").symlink_to(place / "outside")
    with pytest.raises(SandboxError, match="not an empty folder"):
        run(place, tar([member("a", b"x")]))
    assert found(place / "outside") == {"secret": "kept"}


PARTS = st.sampled_from(["a", "b", ".", "..", "", "outside", "secret", "...", " ", "a\n", "~", "é", "\udcff"])
PATHS = st.lists(PARTS, min_size=1, max_size=6).map("/".join).filter(bool)
KINDS = st.sampled_from([tarfile.REGTYPE, tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE])
MEMBERS = st.builds(lambda n, k, t: member(n, b"evil" if k == tarfile.REGTYPE else b"", k, to=t), PATHS, KINDS, PATHS)


@given(layers=st.lists(st.lists(MEMBERS, max_size=6), min_size=1, max_size=3), as_image=st.booleans())
def test_no_mixture_of_paths_leaves_the_folder(
    tmp_path_factory: pytest.TempPathFactory, layers: list[list[Member]], as_image: bool
) -> None:
    place = tmp_path_factory.mktemp("mixed")
    (place / "outside").mkdir()
    (place / "outside" / "secret").write_text("kept")
    (place / "secret").write_text("kept")
    content = image([tar(layer) for layer in layers]) if as_image else tar(layers[0])
    try:
        root = run(place, content, unpack_image if as_image else unpack)
        assert stat.S_IMODE(root.stat().st_mode) in (0o755, 0o644)
        inodes = {(place / "outside/secret").stat().st_ino, (place / "secret").stat().st_ino}
        assert not inodes & {
            os.lstat(os.path.join(at, name)).st_ino for at, _, names in os.walk(root) for name in names
        }
    except PathRefused:
        assert not (place / "root").exists()
    assert found(place / "outside") == {"secret": "kept"} and (place / "secret").read_text() == "kept"
    assert {path.name for path in place.iterdir()} <= {"archive", "outside", "secret", "root"}


def test_layers_cover_and_delete_what_is_below(place: Path) -> None:
    lower = [
        folder("keep"),
        member("keep/a", b"old"),
        folder("gone"),
        member("gone/deep/x", b"x"),
        folder("opaque", 0o700),
        member("opaque/old", b"x"),
        folder("opaque/sub"),
        member("opaque/sub/old", b"x"),
        member("file", b"x"),
        link("swapped", "keep"),
        folder("tofile"),
        member("tofile/x", b"x"),
    ]
    upper = [
        member("keep/a", b"new", mode=0o600),
        member(".wh.gone"),
        member("opaque/new", b"n"),
        member("opaque/sub/new", b"n"),
        member("opaque/.wh..wh..opq"),
        member(".wh.file"),
        member("file", b"again"),
        member(".wh..wh.plnk"),
        member("keep/.wh.never"),
        member("nowhere/.wh.x"),
        folder("swapped"),
        member("swapped/in", b"real"),
        member("tofile", b"now a file"),
    ]
    root = run(place, image([tar(lower), gzip.compress(tar(upper)), tar([member("keep/b", b"third")])]), unpack_image)
    assert found(root) == {
        "keep": "dir",
        "keep/a": "new",
        "keep/b": "third",
        "opaque": "dir",
        "opaque/new": "n",
        "opaque/sub": "dir",
        "opaque/sub/new": "n",
        "file": "again",
        "swapped": "dir",
        "swapped/in": "real",
        "tofile": "now a file",
    }
    assert stat.S_IMODE((root / "opaque").stat().st_mode) == 0o700
    assert stat.S_IMODE((root / "keep/a").stat().st_mode) == 0o600


def test_a_whiteout_after_its_own_layers_entries_spares_them(place: Path) -> None:
    lower = tar([folder("d"), member("d/old", b"x"), member("f", b"old")])
    upper = tar([member("d/new", b"n"), member(".wh.d"), member("f", b"new"), member(".wh.f")])
    assert found(run(place, image([lower, upper]), unpack_image)) == {"d": "dir", "d/new": "n", "f": "new"}


@pytest.mark.parametrize("name", [".wh...", ".wh..", ".wh.", "a/.wh...", "../.wh.outside", "away/.wh.secret"])
def test_a_whiteout_cannot_delete_elsewhere(place: Path, name: str) -> None:
    lower = tar([folder("a"), link("away", "/outside")])
    with pytest.raises(PathRefused, match="nothing was unpacked"):
        run(place, image([lower, tar([member(name)])]), unpack_image)
    assert_untouched(place)


def test_a_later_layer_cannot_go_through_a_link_of_an_earlier_one(place: Path) -> None:
    outside = str(place / "outside")
    for upper in ([member("away/secret", b"x")], [hard("a", "away/secret")], [folder("away/new")]):
        with pytest.raises(PathRefused, match="goes through 'away'"):
            run(place, image([tar([link("away", outside)]), tar(upper)]), unpack_image)
        assert_untouched(place)


def test_a_layer_that_is_there_twice_is_a_link_in_the_archive(place: Path) -> None:
    manifest = json.dumps([{"Layers": ["0/layer.tar", "1/layer.tar"]}]).encode()
    members = [member("0/layer.tar", tar([member("a", b"x")])), link("1/layer.tar", "../0/layer.tar")]
    assert found(run(place, tar([*members, member("manifest.json", manifest)]), unpack_image)) == {"a": "x"}


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (tar([member("a", b"x")]), "no manifest.json"),
        (image([], count=2), "exactly one image"),
        (tar([member("manifest.json", b"[]")]), "exactly one image"),
        (tar([member("manifest.json", b"{")]), "cannot be unpacked"),
        (tar([member("manifest.json", b'[{"Layers": [1]}]')]), "names no layers"),
        (tar([member("manifest.json", b'[{"Layers": ["gone"]}]')]), "'gone' of its manifest is not in it"),
        (tar([member("manifest.json", b'[{"Layers": ["/etc/passwd"]}]')]), "is not in it"),
        (image([tar([member("a", b"x")])], member("manifest.json", b"[]")), "'manifest.json' is there twice"),
    ],
)
def test_what_is_no_image_says_so(place: Path, content: bytes, told: str) -> None:
    with pytest.raises(SandboxError, match=told.replace(".", r"\.")):
        run(place, content, unpack_image)
    assert_untouched(place)


def test_all_layers_count_together(place: Path) -> None:
    layers = [tar([member(f"f{number}", os.urandom(4000))]) for number in range(3)]
    with pytest.raises(PathRefused, match="'f2' makes it more than 12000 bytes"):
        run(place, image(layers), unpack_image, max_bytes=12_000)
    assert_untouched(place)
