"""Learning from answers that the model samples itself: GRPO and RLOO, under any plan.

A batch is made in five steps: the newest weights go from the training engines to the serving ones
(`weights`), these answer prompts (`generation`), functions judge the answers in a process of their
own (`rewards`), the judgements become advantages (`advantages`), and the answers become rows that
the job's plan trains on (`rollouts`).
"""
