"""The tasks of LongBench v1: official prompts, budgets and scorers (config/ and eval.py of THUDM/LongBench)."""

from __future__ import annotations

from dataclasses import dataclass

FEW_SHOT = ("trec", "triviaqa", "samsum", "lsht")  # no chat form; the first line of the answer counts
CODE = ("lcc", "repobench-p")  # no chat form
EVEN = "_e"  # LongBench-E, evenly spread over lengths: the same tasks, "qasper_e"


@dataclass(frozen=True)
class Task:
    """How one task is asked and judged.

    Attributes:
        scorer: a name of `ridgefill.eval.longbench.scorers`.
        max_new_tokens: of the answer.
        template: with {context} and, in most, {input}.
    """

    scorer: str
    max_new_tokens: int
    template: str


_STORY = (  # "asconcisely" is the official wording
    "Answer the question asconcisely as you can, using a single phrase if possible. "
    "Do not provide any explanation."
)
_STORY_AGAIN = _STORY.replace("Answer the question", "answer the question based on the story")
_ARTICLE = (
    "as concisely as you can, using a single phrase or sentence if possible. If the question cannot be answered "
    'based on the information in the article, write "unanswerable". If the question is a yes/no question, answer '
    '"yes", "no", or "unanswerable". Do not provide any explanation.'
)
_PASSAGES = (
    "Answer the question based on the given passages. "
    "Only give me the answer and do not output any other words."
)
_MULTI = (
    f"{_PASSAGES}\n\nThe following are given passages.\n{{context}}\n\n"
    f"{_PASSAGES}\n\nQuestion: {{input}}\nAnswer:"
)

TASKS = {
    "narrativeqa": Task(
        "qa_f1",
        128,
        "You are given a story, which can be either a novel or a movie script, and a question. "
        f"{_STORY}\n\nStory: {{context}}\n\nNow, {_STORY_AGAIN}\n\nQuestion: {{input}}\n\nAnswer:",
    ),
    "qasper": Task(
        "qa_f1",
        128,
        f"You are given a scientific article and a question. Answer the question {_ARTICLE}\n\n"
        f"Article: {{context}}\n\n Answer the question based on the above article {_ARTICLE}\n\n"
        "Question: {input}\n\nAnswer:",
    ),
    "multifieldqa_en": Task(
        "qa_f1",
        64,
        "Read the following text and answer briefly.\n\n{context}\n\nNow, answer the following question based on "
        "the above text, only give me the answer and do not output any other words.\n\n"
        "Question: {input}\nAnswer:",
    ),
    "multifieldqa_zh": Task(
        "qa_f1_zh",
        64,
        "阅读以下文字并用中文简短回答：\n\n{context}\n\n"
        "现在请基于上面的文章回答下面的问题，只告诉我答案，不要输出任何其他字词。\n\n问题：{input}\n回答：",
    ),
    "hotpotqa": Task("qa_f1", 32, _MULTI),
    "2wikimqa": Task("qa_f1", 32, _MULTI),
    "musique": Task("qa_f1", 32, _MULTI),
    "dureader": Task(
        "rouge_zh",
        128,
        "请基于给定的文章回答下述问题。\n\n文章：{context}\n\n请基于上述文章回答下面的问题。\n\n"
        "问题：{input}\n回答：",
    ),
    "gov_report": Task(
        "rouge",
        512,
        "You are given a report by a government agency. Write a one-page summary of the report.\n\n"
        "Report:\n{context}\n\nNow, write a one-page summary of the report.\n\nSummary:",
    ),
    "qmsum": Task(
        "rouge",
        512,
        "You are given a meeting transcript and a query containing a question or instruction. Answer the query in "
        "one or more sentences.\n\nTranscript:\n{context}\n\nNow, answer the query based on the above meeting "
        "transcript in one or more sentences.\n\nQuery: {input}\nAnswer:",
    ),
    "multi_news": Task(
        "rouge",
        512,
        "You are given several news passages. Write a one-page summary of all news. \n\nNews:\n{context}\n\n"
        "Now, write a one-page summary of all the news.\n\nSummary:",
    ),
    "vcsum": Task(
        "rouge_zh",
        512,
        "下面有一段会议记录，请你阅读后，写一段总结，总结会议的内容。\n会议记录：\n{context}\n\n会议总结：",
    ),
    "trec": Task(
        "classification",
        64,
        "Please determine the type of the question below. Here are some examples of questions.\n\n"
        "{context}\n{input}",
    ),
    "triviaqa": Task(
        "qa_f1",
        32,
        "Answer the question based on the given passage. Only give me the answer and do not output any other "
        "words. The following are some examples.\n\n{context}\n\n{input}",
    ),
    "samsum": Task(
        "rouge",
        128,
        "Summarize the dialogue into a few short sentences. The following are some examples.\n\n"
        "{context}\n\n{input}",
    ),
    "lsht": Task("classification", 64, "请判断给定新闻的类别，下面是一些例子。\n\n{context}\n{input}"),
    "passage_count": Task(
        "count",
        32,
        "There are some paragraphs below sourced from Wikipedia. Some of them may be duplicates. Please carefully "
        "read these paragraphs and determine how many unique paragraphs there are after removing duplicates. In "
        "other words, how many non-repeating paragraphs are there in total?\n\n{context}\n\nPlease enter the "
        "final count of unique paragraphs after removing duplicates. The output format should only contain the "
        "number, such as 1, 2, 3, and so on.\n\nThe final answer is: ",
    ),
    "passage_retrieval_en": Task(
        "retrieval",
        32,
        "Here are 30 paragraphs from Wikipedia, along with an abstract. Please determine which paragraph the "
        "abstract is from.\n\n{context}\n\nThe following is an abstract.\n\n{input}\n\nPlease enter the number of "
        'the paragraph that the abstract is from. The answer format must be like "Paragraph 1", "Paragraph 2", '
        "etc.\n\nThe answer is: ",
    ),
    "passage_retrieval_zh": Task(
        "retrieval_zh",
        32,
        "以下是若干段落文字，以及其中一个段落的摘要。请确定给定的摘要出自哪一段。\n\n{context}\n\n"
        "下面是一个摘要\n\n{input}\n\n"
        '请输入摘要所属段落的编号。答案格式必须是"段落1"，"段落2"等格式\n\n答案是：',
    ),
    "lcc": Task("code_sim", 64, "Please complete the code given below. \n{context}Next line of code:\n"),
    "repobench-p": Task(
        "code_sim", 64, "Please complete the code given below. \n{context}{input}Next line of code:\n"
    ),
}
