import base64

import pytest

from frame.entrypoints.http.chat.media_parts import from_base64, from_text, read_file_part
from frame.entrypoints.http.errors import ApiError

FILES = {
    b"\x89PNG\r\n\x1a\n": "image", b"\xff\xd8\xff\xe0": "image", b"GIF89a": "image", b"RIFF\0\0\0\0WEBPVP8 ": "image",
    b"RIFF\0\0\0\0WAVEfmt ": "audio", b"OggS": "audio", b"ID3\4": "audio", b"\xff\xfb\x90\0": "audio", b"fLaC": "audio",
    b"\0\0\0\x20ftypisom": "video", b"\x1aE\xdf\xa3": "video", b"\0\0\0\x20ftypM4A ": "audio",
}  # fmt: skip


@pytest.mark.parametrize(("data", "modality"), FILES.items())
def test_a_file_is_what_its_content_says(data: bytes, modality: str) -> None:
    encoded = base64.b64encode(data + bytes(60)).decode()
    part = read_file_part({"file_data": f"data:text/plain;base64,{encoded}", "filename": "a.txt"}, "file")
    assert (part.modality, part.param) == (modality, "file.file_data")


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"file_url": "https://example.com/a.pdf"}, "file.file_url is a PDF"),
        ({"file_url": "https://example.com/a"}, "file.file_url is no image"),
        ({"file_data": base64.b64encode(b"%PDF-1.4").decode()}, "file.file_data is a PDF"),
        ({"file_data": "####"}, "file.file_data is no image"),
        ({"file_data": 3}, "file.file_data is"),
        ({"file_id": "file-1"}, "file.file_id is not supported"),
    ],
)
def test_other_files_are_refused(fields: dict[str, object], sentence: str) -> None:
    with pytest.raises(ApiError) as caught:
        read_file_part(fields, "file")
    assert caught.value.message.startswith(sentence)


def test_urls_and_base64() -> None:
    assert read_file_part({"file_url": "https://example.com/a.mp4?x=1"}, "file").modality == "video"
    assert from_text("https://example.com/a.png", "x") == "https://example.com/a.png"
    assert from_text("AAAA", "x") == from_base64("AAAA", "x") == "data:application/octet-stream;base64,AAAA"
    with pytest.raises(ApiError, match="without base64"):
        from_base64("data:image/png,AAAA", "x")
