"""Fables: plots whose players are animals, and pets. Data only; the grammar is grammar.py's."""

from training.grammar import Plot

PLOTS = (
    Plot(
        "winter_store",
        "planning ahead",
        "aa",
        {
            "fun": (
                "sang in the sun",
                "slept all day",
                "danced in the grass",
                "told jokes",
                "swung on a branch",
                "looked at the clouds",
            )
        },
        (
            "It was a warm summer. {NF} gathered {eatsF} from morning to night and put everything [in the {homeF}|in a safe place|away for"
            " the winter]. [{heF:c} did not rest.|{heF:c} worked hard.|Day after day {heF} did this.]",
            '{AG} {fun}. "[Why do you work so hard|Come and play|The summer is too nice for work]," said {NG}. "[Winter will come|I am'
            ' getting ready for the cold days|One day there will be snow]," said {NF}. {NG} [laughed|yawned|shook {hisG} head].',
            "The leaves turned [red|yellow|brown] and fell. Then the snow came. [The ground was hard.|There was nothing to eat anywhere.|The"
            " wind was cold as a knife.] {NG} was [hungry|cold and hungry|thin and sad].",
            'One night there was a knock at the {homeF}. It was {NG}. "[Please, do you have a little food|I have had nothing for {n} days|You'
            ' were right]," said {NG}. {NF} [thought of the summer|looked at {himG} for a while|opened the door wide]. "[Come in and get'
            ' warm|There is enough for two]," said {NF}.',
            'They ate together all winter, and {NG} [sang songs|told stories|kept the fire burning]. When spring came, {NG} said, "[This year'
            ' I will work too|Next summer I will help you|I have learned my lesson]." And {heG} did. [In the evening they danced together.|But'
            " there was always time for a song.]",
        ),
        (
            "What did {NF} gather? {NF} gathered {eatsF}.",
            "What did {NG} do all summer? {NG} {fun}.",
            "Who knocked in the winter? {AG} knocked.",
            "Did {NF} help {NG}? Yes, {NF} let {NG} come in.",
        ),
        "{NF} gathered {eatsF} for the winter and shared with {NG}, who had not.",
    ),
    Plot(
        "trick",
        "clever thinking",
        "aa",
        {
            "lie / proof": (
                "the moon was a cheese at the bottom of the pond / threw a stone at it",
                "there was a bigger {KF} in the well / looked down first",
                "the rope was a snake / touched it with a stick",
                "the best {eatsF} grew on the other side of the swamp / asked a"
                " bird who had been there",
                "it was safe to cross the ice / put a foot on it first",
            )
        },
        (
            "{heF:c} was clever, but {AG} liked to play tricks. [Everyone had been tricked by {NG}.|{NG} laughed at everyone.|No one was safe"
            " from {NG}.]",
            '{day}, {NG} told {NF} that {lie}. "[It is true|Believe me|Go and see for yourself]," said {NG}, and {heG} [winked|smiled|hid a'
            " grin]. {NF} [looked at {himG}|thought for a moment|was not so sure].",
            '{NF} went there, but {heF} did not [hurry|jump|run] like the others. {heF:c} {proof}. "[I see|So that is how it is|Just as I'
            ' thought]," said {NF}. [Now {heF} knew that it was a trick.|It was not true at all.]',
            '{NF} said, "[Come and look, it is wonderful|Oh, thank you|You must see this]!" {NG} was [curious|puzzled|surprised]. "[What|Is it'
            ' true|What is there]?" {heG} {cried}, and {heG} ran so fast that {heG} [slipped|fell over {hisG} own feet|tumbled]. Splash! {NG}'
            " sat in the water.",
            '{NF} [helped {himG} out|gave {himG} a hand|brought a dry blanket]. "[Whoever plays tricks gets wet feet|Now you know how it'
            ' feels|Are you all right]?" said {NF}. {NG} [had to laugh|was ashamed|shook off the water]. After that, {NG} [told the'
            " truth|thought twice|played no more tricks], at least for {n} days.",
        ),
        (
            "What did {NG} tell {NF}? {NG} told {NF} that {lie}.",
            "What did {NF} do first? {NF} {proof}.",
            "Who fell into the water? {AG} fell into the water.",
        ),
        "{NG} wanted to trick {NF}, but {NF} was too clever.",
    ),
    Plot(
        "new_pet",
        "a pet",
        "cx",
        {
            "pet / petn": (
                "puppy / Bello",
                "kitten / Minka",
                "rabbit / Hops",
                "parrot / Coco",
                "hamster / Nut",
                "turtle / Turbo",
                "pony / Star",
            )
        },
        (
            '{heF:c} wanted a pet more than anything. "[A pet is a lot of work|You must feed it every day|It is not a toy]," said {hisF} {H}.'
            ' "[I know|I will do everything|I promise]," said {NF}.',
            "{day}, there was a [box with holes|basket|soft sound] at the door. Inside was {col:a} {pet}! {NF} [could hardly breathe|held it"
            ' very gently|cried for joy]. "[I will call you {petn}|Your name is {petn}]," said {NF}.',
            "For {n} days {NF} [fed {petn}|brought water|cleaned the basket]. But then {AG} called {himF} to play, and {NF} forgot. [The bowl"
            " was empty.|Nobody brushed {petn}.|It rained, and {petn} was outside.] In the evening {petn} [did not come|would not eat|lay still"
            " in the corner].",
            '{NF} was [frightened|so sorry|ashamed]. "[This is my fault|I broke my promise|Please be well]," {heF} said. {heF:c} sat by {petn}'
            " all night with [a blanket|warm milk|a little lamp]. {NG} [came to help|brought {food}|sat there too].",
            "In the morning {petn} [licked {hisF} hand|opened one eye|got up and ate]. {happyF}. After that, {NF} first fed {petn}, and then"
            " {heF} went out to play. [And {NG} came along to brush {petn}.|And {petn} followed {himF} everywhere.]",
        ),
        (
            "What pet did {NF} get? {NF} got {col:a} {pet}.",
            "What was the {pet} called? The {pet} was called {petn}.",
            "What did {NF} forget? {NF} forgot to take care of {petn}.",
        ),
        "{NF} got {col:a} {pet} called {petn} and learned to take care of it.",
    ),
    Plot(
        "big_and_small",
        "being small",
        "aa",
        {"trap": ("a net", "a deep pit", "a rope", "a cage", "thick thorns")},
        (
            "{heF:c} was so small that the others [hardly saw {himF}|stepped over {himF}|laughed at {himF}]. {AG} was [the biggest of all|big"
            ' and strong|twice as tall]. "[What can a little one like you do|You are too small to help]," said {NG}.',
            '"[One day I may help you|Small is not useless|You will see]," said {NF}. {NG} laughed [until the trees shook|loudly|and went'
            " on {hisG} way].",
            "{day}, {NG} was caught in {trap}. {heG:c} [pulled and roared|could not move|called and called]. [All the big ones came.|The strong"
            ' ones tried.|They pushed and pulled.] But nobody could get {himG} out. "[I am lost|It is no use]," said {NG}.',
            "Then {NF} came. {heF:c} was so small that {heF} [slipped inside|crawled under it|went between the knots]. {heF:c} [bit through the"
            " knot|pulled out the pin|made the hole wider], bit by bit. It took {n} hours. {atlast}, {NG} was free!",
            '{NG} [bent down|lay down on the ground|was quiet for a while] and said, "[I was wrong|You are the greatest of us all|Forgive'
            ' me]." {NF} [smiled|sat on {hisG} head|laughed]. "[Now I can see far|Even a small friend is a friend]," {heF} said. {friends}.',
        ),
        (
            "What was {NG} caught in? {NG} was caught in {trap}.",
            "Who freed {NG}? {AF} freed {NG}.",
            "How long did it take? It took {n} hours.",
        ),
        "{AG} laughed at small {NF}, but {NF} freed {himG} from {trap}.",
    ),
    Plot(
        "egg",
        "a strange egg",
        "aa",
        {
            "out / what": (
                "a duckling / followed {himF} everywhere",
                "a little turtle / crawled to the water",
                "a tiny dragon / sneezed a spark",
                "a baby owl / blinked with big eyes",
                "a chick / said peep, peep",
                "a small snake / curled around a twig",
            )
        },
        (
            '{day}, {heF} found a big {col} egg {s1}. [It was still warm.|Nobody was near.|It was as big as {hisF} head.] "[Whose egg is'
            ' this|Who has lost an egg]?" {asked} {NF}.',
            '{NF} carried it to {AG}. "[Is it yours|Did you lose it]?" "[No, mine are smaller|I do not lay eggs|Not mine]," said {NG}. They'
            " asked the [hen|swan|lizard], and the [frog|crow|goose]. [Nobody knew it.|Everyone shook their heads.]",
            '"[It must be kept warm|Someone must sit on it|We cannot leave it here]," said {NG}. So they [made a nest of leaves|wrapped it in'
            " moss|took turns]. {NF} sat on it by day, and {NG} by night. [It was not comfortable.|People laughed at them.|It rained, but they"
            " stayed.]",
            "After {n} days there was a sound. Tick, tick, crack! [A piece fell off.|A small hole appeared.|The egg shook.] And out came {out}! It"
            ' {what}. "[How sweet|Well, hello there|Look at that]!" {cried} {NG}.',
            '"[What shall we call it|Who will be its mother|What does it eat]?" asked {NG}. "[We both will take care of it|We will call it'
            ' Surprise|Let us ask it]," said {NF}. [And so they were three|And so a new friend came into the world|{endday}].',
        ),
        (
            "What did {NF} find? {NF} found a big {col} egg.",
            "What came out of the egg? {out:c} came out of the egg.",
            "Where was the egg? The egg was {s1}.",
            "Who sat on the egg at night? {NG} sat on the egg at night.",
        ),
        "{NF} and {NG} kept a {col} egg warm, and out came {out}.",
    ),
    Plot(
        "greedy",
        "greed",
        "aa",
        {
            "tight": (
                "a hole in the fence",
                "the window of the store room",
                "a gap in the wall",
                "the neck of a big jar",
                "the door of the hen house",
            )
        },
        (
            "{heF:c} was always hungry. [No bowl was ever big enough.|{heF:c} thought of food even in {hisF} sleep.] {day}, {heF} smelled"
            " {food}. The smell came from behind {tight}.",
            '{NF} was thin enough to squeeze through {tight}. And there it was: a whole table full of {food}! "[Just one bite|Nobody will'
            ' notice|Only a little]," said {NF}. {heF:c} ate one. {heF:c} ate {n}. [{heF:c} could not stop.|Soon there was nothing left.]',
            "{hisF:c} tummy grew as round as a ball. {then}, there were steps! {NF} ran to {tight}. [But now {heF} was too fat|{hisF:c} head"
            ' went through, but not {hisF} tummy|{heF:c} stuck fast]. "{ohno}! Help!" {heF} {cried}.',
            '{AG} heard {himF}. "[What happened to you|You look like a pumpkin|Have you been eating]?" said {NG}, and {heG} tried not to'
            ' laugh. {NG} pulled, and {NF} pushed. [Nothing moved.|It was no use.] "[You must wait until you are thin again|You cannot'
            ' stay here]," said {NG}.',
            "So {NF} had to [wait all night|say sorry to the cook|work in the kitchen for {n} days] until {heF} was free. [The cook gave {himF}"
            ' only water.|{hisF:c} tummy hurt.] "[Next time I will ask, and eat just one|Enough is enough]," said {NF}. And that is'
            " what {heF} did.",
        ),
        (
            "What did {NF} eat? {NF} ate {food}.",
            "Where was {NF} stuck? {NF} was stuck in {tight}.",
            "Why was {NF} stuck? {NF} was stuck because {heF} ate too much.",
        ),
        "{NF} ate too much {food} and got stuck in {tight}.",
    ),
    Plot(
        "flying",
        "a dream of flying",
        "aa",
        {
            "way": (
                "a kite made of leaves",
                "a basket and a big balloon",
                "wings of paper",
                "the back of a wild goose",
                "a swing that went higher and higher",
                "an umbrella in a strong wind",
            )
        },
        (
            '{heF:c} wanted to fly. [{heF:c} watched the clouds all day.|At night {heF} dreamed of wings.|"Up there it must be quiet and'
            ' wide," {heF} said.] "[{KF:a} cannot fly|Stay on the ground]," said the others.',
            "{day}, {NF} [jumped from a stump|flapped as hard as {heF} could|ran down the hill]. Plop! {heF:c} landed in [the mud|a bush|a"
            " puddle]. [The others laughed.|It hurt a little.|Again and again {heF} tried.]",
            '{AG} did not laugh. "[Tell me why you want to fly|What would you do up there]?" said {NG}. "[I want to see where the river'
            ' ends|I want to see the whole world at once]," said {NF}. {NG} {thought}. "[Then we need help|I know a way|Come with me],"'
            " said {NG}.",
            'They worked for {n} days. And then they had it: {way}! The wind [blew|came up|whistled]. [{NF} held on tight.|"Ready?" asked'
            " {NG}.] Up, up, up went {NF}! [The trees were like grass.|The river was a silver thread.|The others were as small as ants.]",
            'When {NF} came down again, everyone [ran to {himF}|asked questions|wanted to try]. "[What did you see|Were you afraid]?" they'
            ' asked. "[I saw the sea|I saw where the river ends|I saw that our home is beautiful]," said {NF}. And {heF} hugged {NG}.',
        ),
        (
            "What did {NF} want? {NF} wanted to fly.",
            "How did {NF} fly? {NF} flew with {way}.",
            "Who helped {NF}? {AG} helped {NF}.",
            "How long did they work? They worked for {n} days.",
        ),
        "{NF} wanted to fly, and with {NG}'s help {heF} did.",
    ),
    Plot(
        "two_homes",
        "home is best",
        "aa",
        {
            "country": ("no lamps at night", "cold water to wash", "only one blanket"),
            "town": (
                "a big cat",
                "wheels and horns",
                "people with brooms",
                "traps behind every door",
            ),
        },
        (
            "{heF:c} lived in the [country|fields|hills], in a quiet {homeF}. {day}, {AG} came to visit from the big town. {NF} gave {himG}"
            " {eatsF} and a bed of hay.",
            '"[Is this all you eat|It is so quiet here|You have {country}]," said {NG}. "[Come to town with me|In town we eat cake every'
            ' day|You must see how I live]!" {NF} [was curious|packed a small bag|had never been so far], and so they went.',
            'In town there was a table full of {food}. [The lamps were bright.|The chairs were soft.|{NF} had never seen so much.] "[Eat,'
            ' eat|Take what you like]," said {NG}. {NF} [took one bite|sat down|opened {hisF} mouth]. {then}, there was a terrible noise!',
            'It was {town}! "Run!" {cried} {NG}. They hid [under a cupboard|in a crack|behind a pot] and shook for {n} minutes. {soon} it was'
            ' quiet. They came out. But the noise came again, and again they ran. "[Is it always like this|Does this happen often]?" asked'
            ' {NF}. "Every day," said {NG}.',
            '"Thank you," said {NF}, "but I am going home. [I would rather eat {eatsF} in peace|Better a little in peace than much in fear|I'
            ' miss my quiet {homeF}]." [And {heF} walked back under the stars.|{NG} waved for a long time.] That night {NF} slept'
            " [soundly|like a stone|better than ever].",
        ),
        (
            "Where did {NF} live? {NF} lived in a quiet {homeF}.",
            "What was dangerous in town? In town there was {town}.",
            "Where did {NG} live? {NG} lived in the big town.",
            "Where did {NF} go in the end? {NF} went home.",
        ),
        "{NF} visited {NG} in town, but found that home is best.",
    ),
)
