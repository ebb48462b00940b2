from memsafe_rl.micro_batches import Cursor, permutation, prompt_order, rows_of_step


def test_the_cursor_walks_steps_then_passes_then_rollouts() -> None:
    seen, cursor = [], Cursor()
    for _ in range(9):
        seen.append((cursor.rollout, cursor.epoch, cursor.step, cursor.position))
        cursor = cursor.advance(steps=2, epochs=2, consumed=5, stop=False)
    assert seen == [
        (0, 0, 0, 0),
        (0, 0, 1, 0),
        (0, 1, 0, 0),
        (0, 1, 1, 0),
        (1, 0, 0, 5),
        (1, 0, 1, 5),
        (1, 1, 0, 5),
        (1, 1, 1, 5),
        (2, 0, 0, 10),
    ]


def test_a_stop_leaves_the_rest_of_this_rollout_only() -> None:
    stopped = Cursor(rollout=3, epoch=0, step=0, position=20).advance(steps=2, epochs=4, consumed=5, stop=True)
    assert stopped == Cursor(rollout=4, position=25)


def test_rows_of_a_pass_are_each_row_once_and_reshuffled_next_time() -> None:
    passes = []
    for epoch in (0, 1):
        steps = [rows_of_step(Cursor(epoch=epoch, step=step), 12, 4, seed=7) for step in range(3)]
        assert sorted(row for rows in steps for row in rows) == list(range(12))
        passes.append(steps)
    assert passes[0] != passes[1]
    assert passes[0][1] == rows_of_step(Cursor(step=1), 12, 4, seed=7)


def test_orders_are_pure_functions_and_differ_by_key() -> None:
    assert permutation(50, 1, 2, 3) == permutation(50, 1, 2, 3)
    assert len({tuple(permutation(50, a, b)) for a in range(6) for b in range(6)}) == 36
    assert prompt_order(4, 0, 3, shuffle=False) == [0, 1, 2, 3]
    assert sorted(prompt_order(40, 0, 3, shuffle=True)) == list(range(40))
    assert prompt_order(40, 0, 0, shuffle=True) != prompt_order(40, 0, 1, shuffle=True)
