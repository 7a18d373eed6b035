"""Small rows of the official form."""

import json


def v1_row(**fields):
    row = {
        "input": "Where is the key?",
        "context": "The key is in the blue box.",
        "answers": ["in the blue box", "the box"],
        "length": 10,
        "dataset": "qasper",
        "language": "en",
        "all_classes": None,
        "_id": "a1",
    }
    return row | fields


def v2_row(**fields):
    row = {
        "_id": "b1",
        "domain": "Single-Document QA",
        "sub_domain": "Literary",
        "difficulty": "easy",
        "length": "short",
        "question": "Where is the key? ",
        "choice_A": "In the box.",
        "choice_B": "At home.",
        "choice_C": "Nowhere.",
        "choice_D": "Lost.",
        "answer": "A",
        "context": "\nThe key is in the blue box.\n",
    }
    return row | fields


def write_lines(path, rows):
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path
