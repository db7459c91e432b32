"""Sentences to calibrate and measure a text model on when there is no data of the user's own yet.

Short and long, plain and technical, with numbers, names and punctuation. Real ranges need texts like those that will
be served.
"""

from __future__ import annotations

SENTENCES: tuple[str, ...] = (
    "The harbour was quiet before the first ferry arrived.",
    "Two engineers are soldering a sensor onto a small board.",
    "Rain is expected in the north, with gusts of up to 70 km/h near the coast.",
    "She plays the cello.",
    "A dog runs after a red ball across the wet grass.",
    "Our quarterly revenue rose by 4.2 percent, mostly thanks to repairs.",
    "How do I reset the password of a router that I bought second-hand?",
    "No.",
    "The committee postponed its vote because three of its eleven members had not yet read the report.",
    "Fresh basil, two ripe tomatoes, a spoon of olive oil and a pinch of salt are all you need.",
    "Please restart the pump, then check whether pressure stays above 2 bar for ten minutes.",
    "An old man reads a newspaper on a bench in the park.",
    "The film is slow, beautifully lit, and about twenty minutes too long.",
    "Mount the bracket with four M4 screws and tighten them crosswise.",
    "He did not call, and nobody was surprised.",
    "In 1887 the observatory received a new lens from a workshop in Jena.",
    "Is the last train to Lisbon still running on Sundays?",
    "The model was trained on images from three cameras; its accuracy fell by half on the fourth.",
    "Children are building a castle out of sand.",
    "Prices for copper fell again on Tuesday as stocks in Asian warehouses grew.",
    "I have never eaten anything this spicy, and I would order it again.",
    "The court found that the contract had ended in May, so no damages were owed.",
    "A woman slices an onion.",
    "Error 0x1F: the device did not answer within 500 ms.",
    "When the glacier retreated it left a lake, a ridge of rubble, and soil in which birches took hold within decades.",
    "Could you turn down the music a little?",
    "The striker missed two penalties in the same match and was still cheered off the pitch.",
    "Batteries lose capacity in the cold because the reactions inside them slow down.",
    "My flight was cancelled!",
    "A flock of starlings turns over the stubble field.",
    "The vaccine halved the number of severe cases among people above sixty-five.",
    "Fold the paper along the dotted line, turn it over, and press the corners flat with your thumb.",
    "Ministers of five countries met in Vienna to discuss the price of gas.",
    "Great service, friendly staff, terrible coffee.",
    "The bridge carries 38,000 vehicles a day, twice as many as it was designed for.",
    "A cyclist is waiting at a traffic light next to a yellow van.",
    "Whoever wrote this manual has clearly never opened the machine.",
    "Light from the star takes 4.3 years to reach us.",
    "The library lends tools as well as books: drills, ladders, even a sewing machine.",
    "Sales of electric cars overtook those of diesels for the first time in March, the association said on Friday.",
    "Someone is knocking.",
    "The gene is active in the roots but silent in the leaves, which surprised the team.",
    "A man is playing a guitar on a stage in front of a small crowd.",
    "If the indicator blinks twice, replace the filter; if it blinks three times, call the service number on the back.",
    "They sold the farm, moved to the city, and opened a bakery that failed within a year.",
    "The teacher drew a triangle on the board and asked which of its angles was the largest.",
    "Wind turbines stood still for most of the week.",
    "Your parcel has been handed to a neighbour.",
)


def long_texts() -> list[str]:
    """Paragraphs of growing length made of the sentences, for measuring."""
    return [" ".join(SENTENCES[start : start + size]) for start, size in ((0, 3), (7, 5), (15, 8), (24, 12))]
