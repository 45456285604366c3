"""Plots about friends: losing, sharing, quarrelling, giving. Data only; the grammar is
grammar.py's.
"""

from training.grammar import Plot

PLOTS = (
    Plot(
        "lost_toy",
        "helping",
        "xx",
        {},
        (
            "{heF:c} had {O:a} that {heF} [loved|liked] very much. [{heF:c} took it everywhere.|It was a gift from"
            " {hisF} {H}.|{heF:c} played with it every day.|{heF:c} even slept with it at night.]",
            "{day}, {NF} [went to play|was playing|took the {toy} to play] {at}. [{soon}|When it was time to go home],"
            ' the {toy} was [gone|missing]! "{ohno}! Where is my {O}?" {cried} {NF}.',
            "{NF} looked {s1}. [It was not there.|There was nothing but dust.|No {toy}.] {heF:c} looked {s2}. [It was not"
            " there either.|{heF:c} found only an old [shoe|spoon|cup].|Still nothing.] {sadF}.",
            '{then}, {AG} came by. "[Why are you sad|What is wrong|What are you looking for], {NF}?" {asked} {NG}.'
            ' "I [lost|cannot find] my {O}," {said} {NF}. "{comfort}. [Let us look together|I will help you|Four eyes'
            ' see more than two]," said {NG}.',
            "[They looked high and low.|They looked and looked.|They walked slowly and looked at every spot.|] {atlast},"
            ' {NG} [looked|peeked] {s3}. [There it was!|There was the {O}!] "[Here it is|I found it|Look]!" {cried} {NG}.',
            '{happyF}. "{thanks}!" said {NF}. [They played with the {toy} until the sun went down.|From that day on,'
            " {NF} kept the {toy} close.|They shared the {toy} all afternoon.|They went home together.]",
        ),
        (
            "What did {NF} lose? {NF} lost {hisF} {O}.",
            "What color was the {toy}? The {toy} was {col}.",
            "Where was the {toy}? The {toy} was {s3}.",
            "Who helped {NF}? {AG} helped {NF}.",
            "Where did {NF} look first? {NF} looked {s1} first.",
        ),
        "{NF} lost {hisF} {O}, and {NG} helped {himF} find it {s3}.",
    ),
    Plot(
        "share",
        "sharing",
        "xx",
        {},
        (
            "{heF:c} had {O:a}. [It was new and shiny.|{heF:c} thought it was the best {toy} in the world.|Nobody else had"
            " one like it.|{hisF:c} {H} had made it for {himF}.]",
            '{day}, {AG} came to {NF} {at}. "[May I play with your {toy}|Can I have a turn|Will you share your {toy} with'
            ' me]?" asked {NG}. "[No! It is mine|No, go away|No, you might break it]," said {NF}. {NG} [walked away|sat'
            " down alone|looked at the ground] and [was sad|did not say a word|felt very small].",
            "{NF} played alone. [But soon it was not fun.|But playing alone was dull.|But the {toy} was not so nice"
            " anymore.] {heF:c} saw {NG} {s1}. {NF} [felt bad|thought about it|remembered how it felt to be left out].",
            '{heF:c} [went|walked|ran] to {NG}. "[I am sorry|Sorry I was mean]. [Let us play together|You can have a'
            ' turn|We can share]," said {NF}. {NG} [smiled|began to smile|looked up]. "{thanks}!" said {NG}.',
            "[They took turns with the {toy}.|They played all day with the {toy}.|They made up a new game with the {toy}.]"
            " [It was much more fun than before.|They laughed a lot.] {NF} learned that [a toy is more fun with a"
            " friend|sharing makes two people happy|it feels good to share].",
        ),
        (
            "What did {NG} want? {NG} wanted to play with the {O}.",
            "What did {NF} say at first? {NF} said no.",
            "Where was {NG} sitting? {NG} was {s1}.",
            "What did {NF} learn? {NF} learned to share.",
            "What color was the {toy}? The {toy} was {col}.",
        ),
        "{NF} did not want to share {hisF} {O} with {NG}, but then they played together.",
    ),
    Plot(
        "gift",
        "gifts",
        "xx",
        {
            "gift": (
                "a card",
                "a necklace of shells",
                "a picture",
                "a little boat of bark",
                "a crown of flowers",
                "a song",
                "a cup of clay",
                "a paper bird",
                "a bookmark",
                "a woolen hat",
            ),
            "coins": ("two", "three", "four", "five"),
        },
        (
            "[Tomorrow was|It was almost] {NG}'s birthday. {AG} was {NF}'s best friend. {NF} had only {coins} coins [in"
            " {hisF} pocket|in a jar|in {hisF} purse].",
            '{NF} went to the market. [There was {O:a}, but it cost ten coins.|The {O} in the window cost too much.] "[I'
            ' do not have enough|Only {coins} coins! It is not enough]," said {NF}, and {heF} went home [sadly|with empty'
            " hands|without a gift].",
            '{hisF:c} {H} said, "[You do not need coins to make a friend happy|The best gifts are made, not bought|Think of'
            ' what {NG} likes]". {NF} thought about this [all evening|for a long time]. Then {heF} [had an idea|jumped'
            " up|laughed]. {heF:c} made {gift}.",
            "The next day there was a party. [Some friends brought big boxes.|There were {many} gifts.|There was {food} to"
            ' eat.] {NF} gave {NG} {gift}. "[I made it myself|It is not much]," {heF} said {quietly}.',
            '{NG} [hugged {himF}|smiled and smiled|held it up for all to see]. "[This is my favorite gift|I will keep it'
            ' for ever|Nobody ever made something for me before]!" said {NG}. [And {NF} was as happy as could be|{happyF}].',
        ),
        (
            "What did {NF} make? {NF} made {gift}.",
            "How many coins did {NF} have? {NF} had {coins} coins.",
            "Whose birthday was it? It was {NG}'s birthday.",
        ),
        "{NF} had no money for a gift, so {heF} made {gift} for {NG}.",
    ),
    Plot(
        "quarrel",
        "saying sorry",
        "xx",
        {
            "thing / why": (
                "tower of blocks / it fell when {NG} ran past",
                "picture / {NG} spilled water on it",
                "sand castle / {NG} stepped on it",
                "snow house / {NG} leaned on it",
                "paper kite / {NG} pulled the string too hard",
            )
        },
        (
            "{heF:c} and {hisF} friend {AG} [played together every day|liked the same games|were always together].",
            "{day}, {NF} made [a beautiful|a very fine|a big] {thing}. But {why}. The {thing} was [ruined|spoiled|broken]."
            ' "[Look what you did|You broke it|Go away]!" {cried} {NF}. "[It was an accident|I did not mean it]," said'
            " {NG}. But {NF} [did not listen|turned away|was too angry to listen].",
            "{NG} went home. {NF} [sat alone|kicked a stone|folded {hisF} arms]. [The day felt long.|It was very"
            " quiet.|Nobody laughed.] {soon}, {NF} [missed {NG}|was not angry anymore|felt lonely].",
            '"[A friend is worth more than a {thing}|A {thing} can be made again]," said {hisF} {H}. So {NF} went to {NG}\'s'
            ' door and knocked. "I am sorry I shouted," said {NF} {quietly}. "And I am sorry about your {thing}," said'
            " {NG}. [They shook hands.|They hugged.|They both began to laugh.]",
            "Together they made a new {thing}. [It was even better than the first|It was bigger and stronger|It took all"
            " afternoon]. {friends}.",
        ),
        (
            "What did {NF} make? {NF} made a {thing}.",
            "Why was {NF} angry? {NF} was angry because {why}.",
            "Who said sorry first? {NF} said sorry first.",
            "What did they make together? They made a new {thing}.",
        ),
        "{NF} was angry with {NG} about a {thing}, but they said sorry and made a new one.",
    ),
    Plot(
        "new_friend",
        "a new friend",
        "xx",
        {
            "game": (
                "hide and seek",
                "tag",
                "jump rope",
                "marbles",
                "catch",
                "pirates",
                "a guessing game",
                "leapfrog",
            )
        },
        (
            "{NF} had just moved to a new [house|home|place]. {heF:c} did not know anybody. [Every day {heF} looked out of"
            " the window.|{heF:c} missed {hisF} old friends.|The days were long and quiet.]",
            "{day}, {NF} went for a walk {at}. [Some others were playing there|There was laughter everywhere], but {NF} was"
            " too [shy|scared|nervous] to say hello. {heF:c} [sat down|hid|waited] {s1} and watched.",
            '{then}, {O:a} [rolled|landed|dropped] right in front of {NF}. {AG} came running after it. "[Is that yours|Did'
            ' you lose this]?" asked {NF}. "[Yes, thank you|Yes, it is mine]!" said {NG}. "[Who are you|What is your'
            ' name|Are you new here]?"',
            '"I am {NF}," said {NF} {quietly}. "[Do you want to play {game} with us|Come and play {game}|We need one more'
            ' for {game}]?" {asked} {NG}. {NF} [nodded|smiled|stood up at once]. They played {game} [all'
            " afternoon|until dinner|until it was dark].",
            '"[Will you come back tomorrow|See you tomorrow|You are fun to play with]," said {NG}. [That night|When {heF}'
            ' got home], {NF} told {hisF} {H}, "I have a friend now!" [The new house felt like home|{happyF}|{endday}].',
        ),
        (
            "What did they play? They played {game}.",
            "Who was {NF}'s new friend? {AG} was {NF}'s new friend.",
            "What did {NG} lose? {NG} lost {O:a}.",
            "Where was {NF} hiding? {NF} was {s1}.",
        ),
        "{NF} was new and alone until {NG} asked {himF} to play {game}.",
    ),
    Plot(
        "secret",
        "keeping a promise",
        "xx",
        {
            "secret": (
                "a nest with three blue eggs",
                "a cave behind the waterfall",
                "a path to the old tower",
                "a bush full of sweet berries",
                "a pond with golden fish",
                "a hollow tree like a little room",
            )
        },
        (
            '{heF:c} had a friend, {AG}. {day}, {NG} said, "[I want to show you something|Come with me|I found'
            ' something]. But you must promise to tell nobody." "I promise," said {NF}.',
            "{NG} led {NF} [through the bushes|over the hill|along a small path]. [They walked on tiptoe.|They did not make"
            ' a sound.|] There it was: {secret}! "[How wonderful|It is beautiful|I have never seen such a thing],"'
            " {NF} whispered.",
            'The next day the others asked, "[Where were you yesterday|What did you see|Why are you smiling]?" {NF} [wanted'
            " to tell them|opened {hisF} mouth|almost told them]. [The secret tickled like a feather.|It was so hard to"
            ' keep quiet.] But a promise is a promise. "[I cannot tell you|It is not my secret]," said {NF}.',
            "They [offered|gave] {himF} {food}. They [begged|teased|asked again and again]. But {NF} [only smiled|shook"
            " {hisF} head|did not say a word].",
            'When {NG} heard about it, {heG} [hugged {NF}|was proud of {NF}|jumped for joy]. "[You kept your promise|I knew I'
            ' could trust you|You are a true friend]!" said {NG}. {friends}.',
        ),
        (
            "What was the secret? The secret was {secret}.",
            "Did {NF} tell the secret? No, {NF} kept the promise.",
            "Who showed {NF} the secret? {AG} showed it to {NF}.",
        ),
        "{NG} showed {NF} {secret}, and {NF} kept the secret.",
    ),
    Plot(
        "sick_friend",
        "caring",
        "xx",
        {
            "ill": (
                "a cold",
                "a sore throat",
                "a fever",
                "a hurt foot",
                "a bad cough",
                "a tummy ache",
            )
        },
        (
            "Every [morning|day], {NF} met {hisF} friend {AG} {at}. But {day}, {NG} did not come. [{NF} waited and"
            " waited.|{NF} looked up and down the road.|{NF} called, but nobody answered.]",
            '{NF} went to {NG}\'s home and knocked. "[Come in|Who is there|Is that you]?" said a weak voice. {NG} was in bed'
            ' with {ill}. "[I cannot play today|I must stay in bed|I feel so bad]," said {NG}.',
            '"{comfort}," said {NF}. {heF:c} [ran home|hurried home|went to the kitchen] and came back with {food} and {O:a}.'
            " [{heF:c} opened the window|{heF:c} made the bed|{heF:c} put flowers in a cup] and [read a story|sang a"
            " song|told jokes] to {NG}.",
            "{NF} came every day for {n} days. [On the first day {NG} only slept.|Each day {NG} was a bit better.|Each day"
            ' {NG} laughed a little more.] On the last day, {NG} sat up and said, "[I feel well again|I am hungry|Let us go'
            ' out and play]!"',
            'They walked {at} together. "[You made me well|A friend is the best medicine|I will never forget this]," said'
            " {NG}. [And when {NF} had {ill} in the winter, {NG} came every day too|{friends}|{happyF}].",
        ),
        (
            "What was wrong with {NG}? {NG} had {ill}.",
            "What did {NF} bring? {NF} brought {food} and {O:a}.",
            "How many days did {NF} come? {NF} came for {n} days.",
        ),
        "{NG} was in bed with {ill}, and {NF} took care of {himG} for {n} days.",
    ),
    Plot(
        "letter",
        "writing a letter",
        "xx",
        {
            "far": (
                "on the other side of the sea",
                "in the big city",
                "far away in the north",
                "behind the mountains",
                "in another land",
                "three days away by train",
            )
        },
        (
            "{hisF:c} best friend, {AG}, lived {far}. {NF} [missed {himG}|thought of {himG} every day|wished {heG} were here].",
            '{day}, {NF} took a [clean|white|big] sheet of paper and wrote a letter. "Dear {NG}, [how are you|I miss you|do'
            ' you still remember me]? Today it is {W} here. Your friend, {NF}." {heF:c} put {O:a} in the envelope too, [as a'
            " gift|as a surprise|for luck].",
            "{NF} [ran to the post office|gave the letter to the postman|dropped the letter in the box]. Then {heF} waited."
            " One day went by, then two, then {n}. [No answer came.|The box stayed empty.|{NF} looked in the box every"
            " morning.]",
            "{atlast}, there was a [letter|thick envelope|small parcel] with {NF}'s name on it. {hisF:c} hands [shook|were"
            ' quick]. "Dear {NF}, [thank you for the {toy}|I love the {toy}|the {toy} is on my table]. I am coming to see'
            ' you! Your friend, {NG}."',
            "{happyF}. {heF:c} [ran to tell {hisF} {H}|read the letter ten times|put the letter under {hisF} pillow]. And"
            " when {NG} came in the summer, they [talked|played|laughed] [all day long|until late at night].",
        ),
        (
            "Where did {NG} live? {NG} lived {far}.",
            "What did {NF} put in the envelope? {NF} put {O:a} in the envelope.",
            "Who wrote the first letter? {NF} wrote the first letter.",
        ),
        "{NF} wrote a letter to {NG}, who lived {far}, and {NG} came to visit.",
    ),
)
