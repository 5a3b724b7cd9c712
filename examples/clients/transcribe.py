"""Transcribes audio files, as text or as subtitles.

frame serve --model /models/whisper-large-v3
python transcribe.py talk.wav --model whisper-large-v3 --format srt > talk.srt
"""

from __future__ import annotations

import argparse
from pathlib import Path

from openai import OpenAI


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--base-url", default="http://127.0.0.1:30000/v1")
    parser.add_argument("--model", required=True)
    parser.add_argument("--format", choices=["text", "srt", "vtt"], default="text")
    parser.add_argument("--language", help="two letters; without it the model detects the language")
    parser.add_argument("--translate", action="store_true", help="into English")
    args = parser.parse_args()
    client = OpenAI(base_url=args.base_url, api_key="none")
    for file in args.files:
        if args.translate:
            found = client.audio.translations.create(model=args.model, file=file, response_format=args.format)
        else:
            language = {} if args.language is None else {"language": args.language}
            found = client.audio.transcriptions.create(model=args.model, file=file, response_format=args.format, **language)
        print(str(found).strip())


if __name__ == "__main__":
    main()
