"""Which values get a buffer, and what a kernel reads."""

from automesh.ir.fusion import fuse
from automesh.platforms import platform_named
from tests.support.samples.graphs import SIZES, Program


def sizes(reads):
    return {value: size.at(SIZES) for value, size in reads.items()}


def test_elementwise_work_is_done_where_it_is_read():
    program = Program()
    x = program.argument((1024, 64), (("fsdp",), ()))
    chain = program("tanh", program("add", x, program("negate", x)))
    total = program("reduce", chain, shape=(1024,), split=(("fsdp",),), dims=(1,))
    fusion = fuse(program.graph(total))
    assert fusion.stored == {x, total}
    assert sizes(fusion.reads([chain])) == {x: 1024 * 64 * 4 / 4}


def test_a_returned_value_is_stored_by_one_kernel_that_reads_what_is_behind_it():
    program = Program()
    x, y = program.argument((64, 64)), program.argument((64, 64))
    z = program("exponential", program("multiply", x, y))
    fusion = fuse(program.graph(z))
    assert z in fusion.stored
    assert set(fusion.inputs[z]) == {x, y}


def test_views_have_no_buffer_but_what_they_show_may():
    program = Program()
    x = program.argument((64, 64))
    doubled = program("add", x, x)
    flat = program("reshape", doubled, shape=(4096,))
    moved = program.reduce(flat, "tp")
    fusion = fuse(program.graph(moved))
    assert doubled in fusion.stored
    assert flat not in fusion.stored
    assert set(fusion.reads([flat])) == {doubled}


def test_a_value_read_often_is_stored_if_that_moves_less():
    program = Program()
    many = [program.argument((64, 64)) for _ in range(6)]
    total = many[0]
    for one in many[1:]:
        total = program("add", total, one)
    ends = [program("reduce", total, shape=(64,), dims=(d,)) for d in (0, 1, 0)]
    assert total in fuse(program.graph(*ends)).stored

    program = Program()
    x = program.argument((64, 64))
    cheap = program("negate", x)
    ends = [program("reduce", cheap, shape=(64,), dims=(d,)) for d in (0, 1, 0)]
    assert cheap not in fuse(program.graph(*ends)).stored


def test_a_product_is_written_where_it_is_smallest():
    program = Program()
    x, w, b = (program.argument(shape) for shape in ((64, 32), (32, 128), (64, 128)))
    product = program.dot(x, w)
    narrow = program("convert", program("add", product, b), dtype="bf16")
    fusion = fuse(program.graph(narrow))
    operation = product.producer
    end, beside = fusion.written(operation)
    assert end is narrow
    assert set(beside) == {b}
    assert product not in fusion.stored
    assert narrow in fusion.stored


def test_a_product_that_two_read_is_stored_itself():
    program = Program()
    product = program.dot(program.argument((64, 32)), program.argument((32, 128)))
    narrow = program("convert", product, dtype="bf16")
    fusion = fuse(program.graph(narrow, program("negate", product)))
    assert fusion.written(product.producer) == (product, {})
    assert product in fusion.stored


def test_a_slice_reads_only_its_part():
    program = Program()
    x = program.argument((16, 64, 64))
    part = program("dynamic_slice", program("negate", x), shape=(1, 64, 64), sizes=(1, 64, 64))
    fusion = fuse(program.graph(program("reduce", part, shape=(64,), dims=(0, 1))))
    assert sizes(fusion.reads([part])) == {x: 64 * 64 * 4}


def test_a_part_that_other_devices_have_too_is_not_read():
    program = Program()
    x = program.argument((64, 64))
    fusion = fuse(program.graph(program("reduce", program.slice(x, ("fsdp",), ()), shape=())))
    (size,) = fusion.sources[x.users[0].results[0]].values()
    assert size.at(SIZES) == 64 * 64 * 4 / 4
    assert size.powers == (("fsdp", -1),)


def test_what_a_loop_only_hands_on_is_the_same_buffer():
    program = Program()
    x, weights = program.argument((64, 64)), program.argument((4, 64, 64))

    def body(inside, x, weights):
        return inside("tanh", x), weights

    carried, handed_on = program.loop(4, [x, weights], body)
    fusion = fuse(program.graph(carried, handed_on))
    assert set(fusion.reads([handed_on])) == {weights}
    assert carried in fusion.stored


def test_small_constants_are_part_of_the_program():
    program = Program()
    small, large = program.constant((8,)), program.constant((1024, 1024))
    moved = [program("custom_call", one, target="f") for one in (small, large)]
    fusion = fuse(program.graph(*moved))
    assert small not in fusion.stored
    assert large in fusion.stored


def test_what_a_library_of_a_gpu_convolves_lies_in_memory():
    """cuDNN reads arrays: what is computed for it is written first, and read again."""
    program = Program()
    x, w = program.argument((8, 32, 32, 16)), program.argument((3, 3, 16, 16))
    image = program("tanh", x)
    convolved = program("convolution", image, w, shape=(8, 32, 32, 16))
    graph = program.graph(convolved)
    assert image in fuse(graph, platform_named("gpu")).stored
    assert image not in fuse(graph).stored


def test_what_a_library_of_a_gpu_convolves_is_written_as_it_is():
    program = Program()
    x, w = program.argument((8, 32, 32, 16)), program.argument((3, 3, 16, 16))
    convolved = program("convolution", x, w, shape=(8, 32, 32, 16))
    graph = program.graph(program("convert", convolved, dtype="bf16"))
    assert convolved in fuse(graph, platform_named("gpu")).stored
    assert convolved not in fuse(graph).stored


def test_the_cpu_compiler_joins_along_the_last_dimension_apart():
    """As of columns that are rolled; what is short there, or joined elsewhere, is fused."""

    def joined(size: int, dimension: int):
        program = Program()
        x = program.argument((size, size))
        begin, end = program("negate", x), program("tanh", x)
        shape = (size, 2 * size) if dimension else (2 * size, size)
        both = program("concatenate", begin, end, shape=shape, dim=dimension)
        total = program("reduce", program("add", both, both), shape=())
        return program.graph(total), {begin, end, both}

    graph, pieces = joined(64, 1)
    assert pieces <= fuse(graph, platform_named("cpu")).stored
    assert not pieces & fuse(graph, platform_named("gpu")).stored
    for size, dimension in ((32, 1), (64, 0)):
        graph, pieces = joined(size, dimension)
        assert not pieces & fuse(graph, platform_named("cpu")).stored
