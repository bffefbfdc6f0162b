"""A file appears whole or not at all, whoever else writes it, and whatever stands in its place."""

import os
import subprocess
import sys
import threading

from recurrent_vit import files
from recurrent_vit.files import write_atomically


def test_a_file_is_on_the_disk_before_it_takes_its_name(tmp_path, monkeypatch):
    path, seen = tmp_path / "file", []
    path.write_bytes(b"old")
    monkeypatch.setattr(files.os, "fsync", lambda file: seen.append((os.fstat(file).st_size, path.read_bytes())))
    write_atomically(path, lambda file: file.write(b"newer"))
    assert seen == [(5, b"old")]
    assert path.read_bytes() == b"newer"


def test_threads_that_write_one_file_leave_it_whole(tmp_path):
    path, failures = tmp_path / ("long name " * 24 + ".json"), []

    def write(content):
        try:
            for _ in range(20):
                write_atomically(path, lambda file: file.write(content))
        except OSError as error:
            failures.append(error)

    threads = [threading.Thread(target=write, args=(letter * 200_000,)) for letter in (b"a", b"b")]
    for thread in threads:
        thread.start()
    seen = set()
    while any(thread.is_alive() for thread in threads):
        if path.exists():
            seen.add(path.read_bytes())
    for thread in threads:
        thread.join()
    assert not failures
    assert seen <= {b"a" * 200_000, b"b" * 200_000}
    assert list(tmp_path.iterdir()) == [path]


def test_standard_output_by_its_name_is_appended_to(tmp_path):
    """What a shell has opened with >> is not emptied, nor replaced."""
    code = (
        "import pathlib; from recurrent_vit.files import write_atomically; print('printed'); "
        "write_atomically(pathlib.Path('/dev/stdout'), lambda file: file.write(b'written'))"
    )
    (tmp_path / "log").write_text("old ")
    with (tmp_path / "log").open("a") as log:
        subprocess.run([sys.executable, "-c", code], stdout=log, check=True)
    assert (tmp_path / "log").read_text() == "old printed\nwritten"


def test_a_link_keeps_pointing_to_its_file_and_a_pipe_stays_a_pipe(tmp_path):
    (tmp_path / "file").write_text("old")
    (tmp_path / "link").symlink_to("file")
    write_atomically(tmp_path / "link", lambda file: file.write(b"new"))
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "file").read_text() == "new"
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    write_atomically(tmp_path / "pipe", lambda file: file.write(b"through"))
    assert os.read(reader, 100) == b"through"
    os.close(reader)
    assert (tmp_path / "pipe").is_fifo()
